"""torch's own unsharded computation in the case's dtype: the comparison of a test without an oracle.

The one of a family lies in `tests/families/unsharded_<family>.py`, and is found by its name.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from equivtest.cases.case import Case
from equivtest.cases.values import draw
from equivtest.oracle import expect_held
from equivtest.oracle.expected import ExpectedTensor
from equivtest.tensors import Placed, same_bits, slice_local


@functools.singledispatch
def unsharded(case: Case, index: int) -> dict[str, torch.Tensor]:
    """Answer name -> global tensor of the case's dtype, computed by torch on one process.

    Raises:
        TypeError: no function is registered for cases of this class.
    """
    raise TypeError(f"no unsharded computation of {type(case).__name__}")


def answers_of(
    case: Case, index: int, forward: Callable[[dict[str, torch.Tensor]], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The answers of a computation with one output: it, the parameters, and what a backward leaves on the leaves."""
    flags = case.given_flags()
    given = {name: tensor.clone().requires_grad_(flags[name]) for name, tensor in draw(case, index).items()}
    output = forward(given)
    if output.requires_grad:
        output.backward(given["cotangent"])
    answers = {"output": output}
    for kind, _, name in (name.partition(".") for name in case.answer_names()):
        if kind == "param":
            answers[f"param.{name}"] = given[name]
        elif kind == "grad":
            answers[f"grad.{name}"] = given[name].grad
    return {name: tensor.detach() for name, tensor in answers.items()}


def held_of(case: Case, found: Mapping[str, torch.Tensor]) -> dict[int, dict[str, Placed]]:
    """Divides these global tensors among the ranks by the case's layouts."""
    layouts = case.layouts()
    return {
        rank: {
            name: Placed(slice_local(tensor, layouts[name], case.mesh_shape, rank), layouts[name])
            for name, tensor in found.items()
        }
        for rank in range(case.world_size)
    }


def errors_beside(case: Case, index: int, found: Mapping[str, torch.Tensor] | None = None) -> dict[str, float]:
    """Returns each tensor's largest error over its allowance, between the oracle and ranks with the tensors `found`.

    Dtypes must be right, and every bit if there are right bits; a value that must be equal and is not has an infinite
    error.

    Args:
        found: The global tensors; `unsharded` by default.
    """
    found = unsharded(case, index) if found is None else found
    expected = expect_held(case, index, held_of(case, found)).tensors
    return {name: _error(name, found[name], tensor) for name, tensor in expected.items() if name in found}


def _error(name: str, actual: torch.Tensor, expected: ExpectedTensor) -> float:
    assert str(actual.dtype) == f"torch.{expected.dtype}" and actual.shape == expected.value.shape, name
    if expected.bits is not None:  # a zero that is a sum may have either sign
        pair = (actual, expected.bits)
        assert same_bits(*(tensor + 0.0 if expected.is_sum else tensor for tensor in pair)), name
    error = (actual.double() - expected.value).abs()
    is_right = (actual == expected.value) | (actual.isnan() & expected.value.isnan())
    ratio = torch.where(is_right, 0.0, error / (0.0 if expected.allowed is None else expected.allowed))
    return float(ratio.nan_to_num(nan=torch.inf).max()) if ratio.numel() else 0.0


for _path in sorted((Path(__file__).parent / "families").glob("unsharded_*.py")):
    importlib.import_module(f"tests.families.{_path.stem}")
