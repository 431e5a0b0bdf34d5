"""torch's own unsharded computation in the case's dtype: what a test without an oracle would compare with.

That of a family lies in `tests/families/unsharded_<family>.py`, and is found by its name.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path

import torch

from equivtest.kit.case import Case
from equivtest.kit.values import draw


@functools.singledispatch
def unsharded(case: Case, index: int) -> dict[str, torch.Tensor]:
    """Answer name -> global tensor of the case's dtype, computed by torch on one process.

    Raises:
        TypeError: nobody has said how for cases of this class.
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


for _path in sorted((Path(__file__).parent / "families").glob("unsharded_*.py")):
    importlib.import_module(f"tests.families.{_path.stem}")
