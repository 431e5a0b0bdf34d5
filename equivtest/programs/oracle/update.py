"""Computes one update of an optimizer from the ranks' parameters, gradients and state before the update."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from equivtest.errors import Misuse
from equivtest.layout import Layout, Replicate
from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.expected import COPIED, ExpectedTensor, resolution_of
from equivtest.oracle.ranged import Ranged
from equivtest.programs.case import ModuleCase
from equivtest.programs.oracle.steps import follow, left_of, within
from equivtest.tensors import dtype_name

FOLLOWED = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD",
)  # fmt: skip
"""The optimizers of torch.optim that are elementwise and made of operations whose bounds are known."""

Tensors = Mapping[str, torch.Tensor]


class Held(NamedTuple):
    """One parameter before an update, assembled from the ranks.

    Attributes:
        gradient: The parameter's gradient. None if the parameter had no gradient.
        state: Same as in `torch.optim.Optimizer.state`. Empty before the first update.
    """

    value: torch.Tensor
    gradient: torch.Tensor | None
    state: Tensors


def expect_update(
    case: ModuleCase,
    optimizer: str,
    groups: Sequence[tuple[Sequence[str], Mapping[str, Any]]],
    held: Mapping[str, Held],
) -> dict[str, tuple[ExpectedTensor, dict[str, ExpectedTensor]]]:
    """Returns parameter -> (its right value after the update, the right entries of its optimizer state).

    Args:
        optimizer: Name of the class in torch.optim, one of FOLLOWED.
        groups: (names of the group's parameters, the group's options) for each group.
        held: Each parameter before the update, with its gradient and state, by name.

    Raises:
        Misuse: torch.optim has no such optimizer, or the optimizer does not take these options.
    """
    from equivtest.oracle.running import RunningError  # torch's decompositions take a second to import

    if optimizer not in FOLLOWED:
        raise Misuse(
            f"optimizer {optimizer[:40]!r} is not one whose update equivtest can compute: use one of "
            f"{', '.join(FOLLOWED)}"
        )
    kind = getattr(torch.optim, optimizer)
    for _, options in groups:
        _require_options(kind, options)
    counted = RunningError(arithmetic_of(case.dtype), 1)  # each rank updates its own elements
    parameters = {name: counted.exactly(each.value).requires_grad_() for name, each in held.items()}
    with counted:
        made: torch.optim.Optimizer = kind(
            [{"params": [parameters[name] for name in names], **options} for names, options in groups]
        )
    for name, parameter in parameters.items():
        if of := held[name].state:
            made.state[parameter] = {
                key: counted.exactly(each) if each.dim() else each.clone() for key, each in of.items()
            }
    updated = [name for names, _ in groups for name in names]
    follow(
        counted, optimizer, made, {name: parameters[name] for name in updated},
        {name: held[name].gradient for name in updated},
    )  # fmt: skip
    tensors = {}
    for name, each in held.items():
        like = _like(case, each.value)
        gradient = each.gradient if name in updated else None
        right = like if gradient is None else left_of(counted, parameters[name], gradient, like)
        state: Tensors = each.state if gradient is None else made.state.get(parameters[name], {})
        tensors[name] = right, {key: _state_of(case, counted, value) for key, value in state.items()}
    return tensors


def _require_options(kind: Any, options: Mapping[str, Any]) -> None:
    """Raises Misuse unless an optimizer has these options and accepts their values."""
    known = kind([torch.zeros(1, requires_grad=True)]).defaults
    if unknown := [option for option in options if option not in known]:
        raise Misuse(f"optimizer {kind.__name__} has no option {unknown[0][:40]!r}")
    taken = inspect.signature(kind).parameters
    try:
        kind([torch.zeros(1, requires_grad=True)], **{name: each for name, each in options.items() if name in taken})
    except (TypeError, ValueError) as error:
        raise Misuse(f"optimizer {kind.__name__} does not take the options of the run: {error}") from error


def _like(case: ModuleCase, value: torch.Tensor) -> ExpectedTensor:
    layout = Layout((Replicate(),) * len(case.mesh_shape))
    return ExpectedTensor(value.detach().double(), None, layout, dtype_name(value.dtype), COPIED)


def _state_of(case: ModuleCase, counted: Any, value: torch.Tensor) -> ExpectedTensor:
    """Returns the right value of an entry of the optimizer's state. Unrounded entries must be equal."""
    if not isinstance(value, Ranged):
        return _like(case, value)
    right = within(counted, value, _like(case, value.value))
    return ExpectedTensor(
        right.value, right.allowed, right.layout, right.dtype, right.derivation, resolution=resolution_of(right.value)
    )
