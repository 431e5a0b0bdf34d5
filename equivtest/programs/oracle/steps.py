"""Computes the right values of training steps, each step from the ranks' values after the previous step.

The gradients of a step are the gradients of the unsharded module with the ranks' parameters.  An update is the update
that the unsharded optimizer computes from the ranks' gradients. So no bound grows from step to step, except the bound
of the optimizer's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from equivtest.cases.case import at_step, in_one_step
from equivtest.errors import Misuse
from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.exact import InexactData
from equivtest.oracle.expected import COPIED, Expected, ExpectedTensor, resolution_of, says_nothing
from equivtest.oracle.held import Held, put_together
from equivtest.oracle.ranged import Parts, Ranged
from equivtest.oracle.rounding import where_finite
from equivtest.programs.case import ModuleCase
from equivtest.programs.oracle.factors import SCALED, rounds_factors
from equivtest.programs.oracle.within import with_buffers
from equivtest.programs.reference import call_builder, in_dtype, with_parameters
from equivtest.programs.steps import TOTAL_NORM, called_optimizer, updated
from equivtest.tensors import DTYPES

if TYPE_CHECKING:
    from equivtest.oracle.running import RunningError
    from equivtest.programs.oracle.forced import Forced

Tensors = Mapping[str, torch.Tensor]
Once = Callable[[ModuleCase, int, Tensors, "Held | None"], Expected]

NORMED = 4
"""Further roundings of a total norm that is computed from the gradients' norms, each by a root and then a power.

Source: torch.nn.utils.get_total_norm (2.13.0), the norm of the gradients' norms.
"""

NOT_SEEN = "the update is smaller than the rounding of the stored parameter, so a missing update would not show"


def expect_steps(case: ModuleCase, index: int, drawn: Tensors, held: Held | None, once: Once) -> Expected:
    """Returns the right values of every step, with the parameters after the step.

    Args:
        held: The ranks' tensors. If None, each step continues from the right values of the previous step.
        once: Function that returns the right values of one forward and backward: see `equivtest.programs.oracle`.
    """
    alone = case.but(optimizer="", steps=1, max_norm=0.0)
    parameters = {name: drawn[name] for name in case.parameter_names()}
    optimizer = Optimizer(case, parameters) if case.training.optimizer else None
    tensors: dict[str, ExpectedTensor] = {}
    for step in range(1, case.training.steps + 1):
        inputs = {name: drawn[at_step(step, name)] for name in alone.given_names() if name not in parameters}
        right = {**once(alone, index, {**inputs, **parameters}, _of_step(held, step)).tensors}
        if case.training.max_norm:
            right |= _clipped(case, right)
        copies = () if step == 1 else tuple(f"param.{name}" for name in parameters)
        tensors |= {at_step(step, name): each for name, each in right.items() if name not in copies}
        if optimizer is not None:
            gradients = {
                name: _gradient(case, held, at_step(step, f"grad.{name}"), right[f"grad.{name}"]) for name in parameters
            }
            left = {updated(step, name): each for name, each in optimizer.update(parameters, gradients).items()}
            tensors |= left
            parameters = {
                name: _held_or_right(case, held, updated(step, name), left[updated(step, name)]) for name in parameters
            }
    return Expected(tensors, {})


def scaled(counted: RunningError, tensor: torch.Tensor, num: int = SCALED) -> torch.Tensor:
    """Returns the tensor with a larger error, which also allows `num` roundings when a step scales each rank's share.

    Call this function outside of the mode `counted`.
    """
    if not isinstance(tensor, Ranged):
        return tensor
    parts = Parts.of(tensor)
    return parts._replace(error=parts.error + counted.roundings.own(parts, num)).wrapped()


def divided_last(counted: RunningError, tensor: torch.Tensor, num: int) -> torch.Tensor:
    """Returns a gradient. An element has no bound if its sum over the gradients of `num` micro-batches may overflow.

    If the loss is a mean, the gradient of each of `num` equal micro-batches may be `num` times as large as its share of
    the result. A step may add these gradients before it divides their sum, as pipelines do.  Call this function outside
    of the mode `counted`.

    Source: _PipelineStageBase.scale_grads in torch/distributed/pipelining/stage.py (2.13.0).
    """
    if not isinstance(tensor, Ranged):
        return tensor
    parts = Parts.of(tensor)
    largest = counted.roundings.record(parts.value.dtype).largest
    return parts._replace(error=where_finite(num * parts.magnitude, largest, parts.error)).wrapped()


def taken_out(counted: RunningError, tensor: torch.Tensor, runs: Sequence[Forced]) -> torch.Tensor:
    """Returns a gradient with a larger error, which also allows a program to remove constant factors from it.

    `runs` has found these factors in the ranks' backward.  Scaling by a power of two is exact unless a value
    underflows. If the factor is below 1, the division that removes the factor enlarges the error of such values. Call
    this function outside of the mode `counted`.
    """
    factors = [factor for run in runs for factor in run.factors.values()]
    if not isinstance(tensor, Ranged) or not factors:
        return tensor
    tensor = scaled(counted, tensor) if rounds_factors(runs) else tensor
    parts = Parts.of(tensor)
    lost = SCALED * counted.roundings.record(parts.value.dtype).eta / min(1.0, *factors)
    return parts._replace(error=parts.error + lost * (parts.magnitude != 0)).wrapped()


def added_up(counted: RunningError, tensor: torch.Tensor, num: int) -> torch.Tensor:
    """Returns a gradient whose error also has the roundings of its sum over `num` micro-batches.

    Call this function outside of the mode `counted`.
    """
    if not isinstance(tensor, Ranged) or num == 1:
        return tensor
    parts = Parts.of(tensor)
    return parts._replace(error=parts.error + counted.roundings.one_by_one(parts, num)).wrapped()


def _of_step(held: Held | None, step: int) -> Held | None:
    if held is None:
        return None
    return {
        rank: {
            in_one_step(name): placed for name, placed in answers.items() if at_step(step, in_one_step(name)) == name
        }
        for rank, answers in held.items()
    }


def _held_or_right(case: ModuleCase, held: Held | None, name: str, right: ExpectedTensor) -> torch.Tensor:
    """Returns the ranks' value, or the right value if ranks lack a part of the value, which another claim reports."""
    found = None if held is None else put_together(held, name, tuple(right.value.shape), case.mesh_shape)
    return (right.value if found is None else found).to(DTYPES[case.dtype])


def _gradient(case: ModuleCase, held: Held | None, name: str, right: ExpectedTensor) -> torch.Tensor | None:
    """Returns the gradient that the optimizer gets.

    This is the ranks' gradient if the ranks have all its elements, otherwise the right gradient.

    The result is None if no rank has an element of the gradient and a correct rank need not have one. An example is the
    gradient of a parameter that no output needs.
    """
    placed = [] if held is None else [tensors.get(name) for tensors in held.values()]
    if right.may_be_none and not any(each is not None and each.local.numel() for each in placed):
        return None
    return _held_or_right(case, held, name, right)


def _clipped(case: ModuleCase, right: Mapping[str, ExpectedTensor]) -> dict[str, ExpectedTensor]:
    """Returns the total norm of the gradients, and the clipped gradients.

    Source: torch.nn.utils.clip_grad_norm_ (2.13.0) multiplies each gradient by max_norm / (norm + 1e-6) if this factor
    is below 1.
    """
    counted = _counted(case)
    names = [f"grad.{name}" for name in case.parameter_names() if not right[f"grad.{name}"].may_be_none]
    gradients = [_ranged(case, right[name]) for name in names]
    zero, layout = torch.zeros((), dtype=torch.float64), case.layouts()[TOTAL_NORM]
    like = ExpectedTensor(zero, None, layout, case.dtype, "", takes_wider=bool(case.training.step))
    if not any(gradient.numel() for gradient in gradients):
        return {TOTAL_NORM: like}
    with counted:
        norm = _norm(case, gradients)
    total = scaled(counted, norm, NORMED)
    with counted:
        factor = torch.clamp(case.training.max_norm / (total + 1e-6), max=1.0)
        clipped = [gradient * factor for gradient in gradients]
    found = {name: within(counted, each, right[name]) for name, each in zip(names, clipped, strict=True)}
    return found | {TOTAL_NORM: within(counted, total, like)}


def _norm(case: ModuleCase, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the norm of all elements of all gradients together, as a 0-dim tensor."""
    if math.isinf(case.training.norm_type):
        return torch.stack([gradient.abs().amax() for gradient in gradients if gradient.numel()]).amax()
    powers = torch.stack([gradient.abs().pow(int(case.training.norm_type)).sum() for gradient in gradients]).sum()
    return powers.sqrt() if case.training.norm_type == 2 else powers


class Optimizer:
    """Runs the code of your optimizer on unsharded tensors, one by one, and counts each operation's roundings."""

    def __init__(self, case: ModuleCase, parameters: Tensors) -> None:
        self._case, self._counted = case, _counted(case)
        module = in_dtype(call_builder(case.build), case.dtype)
        every = dict(module.named_parameters()) | dict(parameters)
        given = {name: self._counted.exactly(value) for name, value in every.items()}
        with_buffers(module, self._counted, dict(module.named_buffers()))
        with self._counted:
            with_parameters(module, given)
            self._optimizer = called_optimizer(case.training.optimizer, module)
        self._parameters = {name: each for name, each in module.named_parameters() if name in parameters}

    def update(self, parameters: Tensors, gradients: Mapping[str, torch.Tensor | None]) -> dict[str, ExpectedTensor]:
        for name, parameter in self._parameters.items():
            for part, new in zip(Parts.of(parameter), Parts.of(parameters[name]), strict=True):
                part.copy_(new)
        follow(self._counted, self._case.training.optimizer, self._optimizer, self._parameters, gradients)
        return {name: self._left(name, parameters[name], gradients[name]) for name in parameters}

    def _left(self, name: str, before: torch.Tensor, gradient: torch.Tensor | None) -> ExpectedTensor:
        case, parameter = self._case, self._parameters[name]
        like = ExpectedTensor(
            before.double(), None, case.layouts()[updated(1, name)], case.dtype, COPIED, parameter.requires_grad
        )
        return like if gradient is None else left_of(self._counted, parameter, gradient, like)


def follow(
    counted: RunningError,
    name: str,
    optimizer: torch.optim.Optimizer,
    parameters: Tensors,
    gradients: Mapping[str, torch.Tensor | None],
) -> None:
    """Runs one step of an optimizer, and counts each operation's roundings. The step updates `parameters` in place.

    Args:
        name: Name of the optimizer, for messages.
        gradients: Gradient of each parameter, by the parameter's name. A missing gradient is None.

    Raises:
        Misuse: the optimizer uses an operation whose roundings cannot be counted.
    """
    counted_gradients = {
        name: None if gradient is None else counted.exactly(gradient) for name, gradient in gradients.items()
    }
    for group in optimizer.param_groups:
        group |= {way: False for way in ("foreach", "fused", "capturable") if way in group}
    try:
        with counted:
            for each, parameter in parameters.items():
                parameter.grad = counted_gradients[each]
            optimizer.step()
    except InexactData as error:
        raise Misuse(f"optimizer {name}: {error}: use an optimizer without this operation") from error
    except Exception as error:  # an arbitrary optimizer's
        raise Misuse(
            f"optimizer {name} cannot be followed operation by operation: {type(error).__name__}: {error}: use another "
            "optimizer"
        ) from error


def left_of(
    counted: RunningError, parameter: torch.Tensor, gradient: torch.Tensor, before: ExpectedTensor
) -> ExpectedTensor:
    """Returns the right value of a parameter after an update. `before` describes the parameter before the update."""
    right = within(counted, parameter, before)
    change = right.value - before.value
    if bool(gradient.any()) and right.allowed is not None and says_nothing(change, right.allowed):
        near = resolution_of(right.value, change=change)
        return replace(right, is_open=True, derivation=NOT_SEEN, resolution=near)
    return right


def _counted(case: ModuleCase) -> RunningError:
    from equivtest.oracle.running import RunningError  # torch's decompositions take a second to import

    return RunningError(arithmetic_of(case.dtype), case.num_shares)


def _ranged(case: ModuleCase, right: ExpectedTensor) -> Ranged:
    value = right.value.to(DTYPES[case.dtype])
    allowed = torch.zeros_like(right.value) if right.allowed is None else right.allowed
    return Parts(value, allowed, value.double().abs() + allowed).wrapped()


def within(counted: RunningError, tensor: torch.Tensor, like: ExpectedTensor) -> ExpectedTensor:
    found = counted.bounded(tensor)
    near = None if like.resolution is None else resolution_of(found.value, like.scale)
    return replace(like, value=found.value, allowed=found.allowed, derivation=found.derivation, resolution=near)
