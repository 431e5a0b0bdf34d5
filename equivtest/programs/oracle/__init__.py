"""Computes a program's right values from its unsharded module, on real numbers or on integers that nothing rounds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from equivtest.base import limits
from equivtest.cases.values import draw
from equivtest.errors import NotSupported, ReferenceRefuses
from equivtest.oracle import expect, expect_held
from equivtest.oracle.expected import Expected, ExpectedTensor, resolution_of
from equivtest.oracle.held import Held, put_together
from equivtest.oracle.operations import Found
from equivtest.programs.boundaries import Capture, is_boundary
from equivtest.programs.case import REAL_MODE, ModuleCase
from equivtest.programs.oracle.exact import EXACT, exactly, prove_exact
from equivtest.programs.oracle.factors import GRADIENT, without_factors
from equivtest.programs.oracle.forced import Forced, boundaries
from equivtest.programs.oracle.held import HeldAt, held_by_one, held_of_parts
from equivtest.programs.oracle.steps import divided_last, expect_steps, scaled, taken_out
from equivtest.programs.oracle.unsharded import Tensors, reduced, run_module, split
from equivtest.programs.oracle.within import ran_within_bounds, within_bounds
from equivtest.programs.reference import call_builder, in_dtype, with_parameters


@expect.register
def expect_module(case: ModuleCase, index: int) -> Expected:
    """Returns outputs, parameters and gradients of the unsharded module, which runs once for each part of the batch.

    The function does not know the ranks' values. So if the case is judged by parts, each part starts from values that
    the unsharded module had in this process. To start from the ranks' values, call `expect_module_held`.

    Raises:
        Misuse: an operation of the module could round the integers of this case, or has no known bound.
        ReferenceRefuses: the module reports that it does not support something.
    """
    return _expected_of(case, index, None)


@expect_held.register
def expect_module_held(case: ModuleCase, index: int, held: Held) -> Expected:
    """Returns right outputs, parameters and gradients. Some may be derived from `held`, the tensors of the ranks.

    If the case has neither `by_parts` nor training, nothing is derived from the ranks' tensors. The result is then the
    same as the result of `expect_module`.

    If the case is judged by parts, each part starts from the ranks' values of the part's inputs. If the module is
    trained, each step starts from the ranks' parameters after the previous step.
    """
    return _expected_of(case, index, held)


def _expected_of(case: ModuleCase, index: int, held: Held | None) -> Expected:
    drawn = draw(case, index)
    try:
        if case.training.is_stepped:
            return expect_steps(case, index, drawn, held, _once)
        return _once(case, index, drawn, held)
    except NotSupported as error:
        raise ReferenceRefuses(
            f"{case.build}: the unsharded module, in {case.dtype}, with {case.takes},", error
        ) from error


def _once(case: ModuleCase, index: int, drawn: Tensors, held: Held | None) -> Expected:
    if case.judge.by_parts and held is not None:
        return _by_parts(case, drawn, held)
    if case.judge.by_parts:
        by_one = [_held_by_one(case, part) for part in split(case, drawn)]
        return answered(case, drawn, *_within_bounds(case, drawn, by_one))
    inputs = {name: _in_float64(tensor) for name, tensor in drawn.items()}
    if case.values[index][0] == REAL_MODE:
        expected = _expected(case, inputs, _within_bounds(case, drawn)[0], {})
        return replace(expected, tensors=measured(expected.tensors))
    bits_used = prove_exact(case)
    return _expected(case, inputs, exactly(case, inputs), {"all": bits_used})


def _held_by_one(case: ModuleCase, given: Tensors) -> HeldAt:
    """Returns a function that looks up tensors at the boundaries of an unsharded module, run in this process."""
    module = with_parameters(
        in_dtype(call_builder(case.build), case.dtype), {name: given[name] for name in case.parameter_names()}
    )
    with Capture(module) as capture:
        run_module(case, module, given)
    return held_by_one(capture.named())


def _by_parts(case: ModuleCase, drawn: Tensors, held: Held) -> Expected:
    """If the case has no step, the result also has each boundary that the ranks recorded."""

    if case.training.step:
        return answered(case, drawn, _within_bounds(case, drawn, held_of_parts(case, held))[0], ())

    def ran(takes_factors: bool) -> tuple[Expected, Sequence[Forced]]:  # noqa: FBT001
        results, runs = _within_bounds(case, drawn, held_of_parts(case, held), takes_factors=takes_factors)
        return answered(case, drawn, results, runs), runs

    return without_factors(ran, lambda name, shape: put_together(held, name, shape, case.mesh_shape))


def answered(case: ModuleCase, drawn: Tensors, found: Mapping[str, Found], runs: Sequence[Forced]) -> Expected:
    """Returns the right value of every judged tensor and boundary of a case that is judged by parts."""
    inputs = {name: _in_float64(tensor) for name, tensor in drawn.items()}
    expected = _expected(case, inputs, found, {})
    answers = {
        name: replace(each, resolution=resolution_of(each.value, each.scale))
        for name, each in measured(expected.tensors).items()
    }
    return replace(expected, tensors=boundaries(case, runs) | answers)


def _expected(case: ModuleCase, given: Tensors, found: Mapping[str, Found], bits_used: Mapping[str, int]) -> Expected:
    """Returns the right value of every judged tensor except boundaries.

    If a judged tensor has no entry in `found`, such as a gradient that no output reaches, its right value is zero. The
    right value of a parameter is a copy of the parameter in `given`.
    """
    tensors, layouts, shapes, dtypes = {}, case.layouts(), case.shapes(), _dtypes(case)
    flags: dict[str, bool | None] = {**case.given_flags()}
    flags |= {name: None if case.training.step else fact.requires_grad for name, fact in case.facts.outputs.items()}
    for name in itertools.filterfalse(is_boundary, case.answer_names()):
        zeros = Found(torch.zeros(shapes[name], dtype=torch.float64), None, EXACT)
        right = found.get(name, zeros)
        if name.startswith("param."):
            right = Found.copy_of(given[name.removeprefix("param.")])
        tensors[name] = ExpectedTensor(
            value=right.value,
            allowed=right.allowed,
            layout=layouts[name],
            dtype=dtypes.get(name, case.dtype),
            derivation=right.derivation,
            takes_wider=bool(case.training.step) and name in case.facts.outputs,
            requires_grad=flags.get(name.removeprefix("param.")),
            may_be_none=name.startswith("grad.") and name not in found,
        )
        if case.accepts_none(name) and tensors[name].is_zero:
            tensors[name] = replace(tensors[name], may_be_none=True)
    return Expected(tensors, bits_used)


def _dtypes(case: ModuleCase) -> dict[str, str]:
    facts = case.facts
    found = {**facts.outputs, **{f"buffer.{name}": fact for name, fact in facts.buffers.items()}}
    return {name: fact.dtype for name, fact in found.items() if fact.dtype}


def _in_float64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _within_bounds(
    case: ModuleCase, given: Tensors, held: Sequence[HeldAt] = (), *, takes_factors: bool = False
) -> tuple[dict[str, Found], list[Forced]]:
    """Returns (outputs and gradients on real numbers with their bounds, the module's run on each part of the batch).

    If `held` has functions that assemble the ranks' values, one for each part of the batch, each part of the module
    starts from those values.

    The module runs in the case's own dtype, because the results may depend on the dtype. For example, the default eps
    of nn.RMSNorm depends on the dtype.
    """
    ran = ran_within_bounds(case, given, held, takes_factors=takes_factors)
    with ran.counted:
        results = ran.rows | {name: reduced(case, stack) for name, stack in ran.stacks.items()}
    gradients = [name for name in results if name.startswith(GRADIENT)]
    if case.training.step:
        results = {name: scaled(ran.counted, tensor) for name, tensor in results.items()}
        results |= {name: divided_last(ran.counted, results[name], case.num_rows) for name in gradients}
    else:
        results |= {name: taken_out(ran.counted, results[name], ran.runs) for name in gradients}
    return {name: within_bounds(ran.counted, tensor) for name, tensor in results.items()}, ran.runs


def measured(tensors: Mapping[str, ExpectedTensor]) -> dict[str, ExpectedTensor]:
    """Returns the tensors, with a `scale` (see `ExpectedTensor`) for each gradient that is zero within its bound.

    The scale is a small fraction of the root mean square of all gradients.  Without the scale, the bound of such a
    gradient would count as too wide, because every bound is wide beside zero. An example is the gradient of a bias of
    the keys. A softmax does not change if a constant is added to all its terms, so this gradient is zero in exact
    arithmetic.
    """
    gradients = [tensor.value.flatten() for name, tensor in tensors.items() if name.startswith("grad.")]
    if not gradients:
        return dict(tensors)
    scale = limits.ZERO_BESIDE * float(torch.cat(gradients).square().mean().sqrt())
    return {name: replace(each, scale=scale) if _is_zero(name, each) else each for name, each in tensors.items()}


def _is_zero(name: str, tensor: ExpectedTensor) -> bool:
    return (
        name.startswith("grad.") and tensor.allowed is not None and bool((tensor.value.abs() <= tensor.allowed).all())
    )
