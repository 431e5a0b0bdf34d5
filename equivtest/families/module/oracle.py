"""What a module of anybody's own gives: the unsharded one in float64, on data that nothing rounds or on real ones."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from equivtest import limits
from equivtest.errors import Misuse
from equivtest.families.module.case import EXACT_MODE, MEAN_OF_PARTS, REAL_MODE, ModuleCase, cotangent_of
from equivtest.families.module.case_boundaries import Capture, is_boundary
from equivtest.families.module.case_facts import call, call_builder, with_parameters
from equivtest.families.module.case_inputs import REAL
from equivtest.families.module.case_outputs import named_outputs
from equivtest.families.module.oracle_apart import TakesApart
from equivtest.families.module.oracle_forced import Forced, boundaries
from equivtest.families.module.oracle_held import HeldAt, held_by_one, held_of_parts
from equivtest.families.module.oracle_steps import expect_steps, scaled
from equivtest.families.module.values import VARIANTS, bounds_of
from equivtest.kit.oracle import expect, expect_held
from equivtest.kit.oracle.averages import Averages
from equivtest.kit.oracle.certificate import Certificate
from equivtest.kit.oracle.declared import arithmetic_of
from equivtest.kit.oracle.exact import InexactData
from equivtest.kit.oracle.expected import COPIED, Expected, ExpectedTensor, resolution_of
from equivtest.kit.oracle.held import Held
from equivtest.kit.oracle.operations import Found, Operations
from equivtest.kit.oracle.places import Places
from equivtest.kit.oracle.ranged import Ranged
from equivtest.kit.values import draw
from equivtest.tensors import DTYPES, slice_local

if TYPE_CHECKING:
    from equivtest.kit.oracle.running import RunningError

EXACT = "equal: the unsharded module in float64, no operation of which can round these values"

Tensors = Mapping[str, torch.Tensor]
Answers = dict[str, torch.Tensor]


@expect.register
def expect_module(case: ModuleCase, index: int) -> Expected:
    """Output, parameters and gradients of the unsharded module; of a divided batch it runs on each part by itself.

    Where each part of the module is judged by itself: as if the ranks held what one process holds.

    Raises:
        Misuse: an operation of the module could round the integers of this case, or is one of which no bound is known.
    """
    return _expected_of(case, index, None)


@expect_held.register
def expect_module_held(case: ModuleCase, index: int, held: Held) -> Expected:
    """As `expect_module`; where the case says so each part of the module from what the ranks held where it begins."""
    return _expected_of(case, index, held)


def _expected_of(case: ModuleCase, index: int, held: Held | None) -> Expected:
    drawn = draw(case, index)
    return expect_steps(case, index, drawn, held, _once) if case.is_stepped else _once(case, index, drawn, held)


def _once(case: ModuleCase, index: int, drawn: Tensors, held: Held | None) -> Expected:
    """What one forward and backward comes to."""
    if case.by_parts and held is not None:
        return _by_parts(case, drawn, held_of_parts(case, held))
    if case.by_parts:
        return _by_parts(case, drawn, [_held_by_one(case, part) for part in split(case, drawn)])
    given = {name: _in_float64(tensor) for name, tensor in drawn.items()}
    if case.values[index][0] == REAL_MODE:
        expected = _expected(case, given, _within_bounds(case, drawn)[0], {})
        return replace(expected, tensors=measured(expected.tensors))
    bits_used = prove_exact(case)
    return _expected(case, given, _exactly(case, given), {"all": bits_used})


def _held_by_one(case: ModuleCase, given: Tensors) -> HeldAt:
    """What one process holds that runs the unsharded module."""
    module = with_parameters(
        call_builder(case.build).to(DTYPES[case.dtype]), {name: given[name] for name in case.parameter_names()}
    )
    with Capture(module) as capture:
        run_module(case, module, given)
    return held_by_one(capture.named())


def _by_parts(case: ModuleCase, drawn: Tensors, held: Sequence[HeldAt]) -> Expected:
    """Every answer of the case, and what is right of each boundary that was held."""
    return answered(case, drawn, *_within_bounds(case, drawn, held))


def answered(case: ModuleCase, drawn: Tensors, found: Mapping[str, Found], runs: Sequence[Forced]) -> Expected:
    """Every answer of a case that is judged by parts."""
    given = {name: _in_float64(tensor) for name, tensor in drawn.items()}
    expected = _expected(case, given, found, {})
    answers = {
        name: replace(each, resolution=resolution_of(each.value, each.scale))
        for name, each in measured(expected.tensors).items()
    }
    return replace(expected, tensors=boundaries(case, runs) | answers)


def _expected(case: ModuleCase, given: Tensors, found: Mapping[str, Found], bits_used: Mapping[str, int]) -> Expected:
    """Every answer but boundaries: what is not found is zero, as what no gradient reaches; parameters are copies."""
    tensors, layouts, shapes, dtypes = {}, case.layouts(), case.shapes(), _dtypes(case)
    flags: dict[str, bool | None] = {**case.given_flags()}
    flags |= {name: None if case.step else fact.requires_grad for name, fact in case.facts.outputs.items()}
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
            requires_grad=flags.get(name.removeprefix("param.")),
            may_be_none=name.startswith("grad.") and name not in found,
        )
    return Expected(tensors, bits_used)


def split(case: ModuleCase, given: Tensors) -> list[dict[str, torch.Tensor]]:
    """What the unsharded module runs on: copies of all, or of what each rank is handed of a divided batch."""
    if not case.is_divided:
        return [{name: tensor.clone() for name, tensor in given.items()}]
    layouts = case.layouts()
    return [
        {name: slice_local(tensor, layouts[name], case.mesh_shape, rank) for name, tensor in given.items()}
        for rank in (case.ranks_of_part(part)[0] for part in range(case.num_parts))
    ]


def _dtypes(case: ModuleCase) -> dict[str, str]:
    """Dtypes of those answers that have another than the case's."""
    facts = case.facts
    found = {**facts.outputs, **{f"buffer.{name}": fact for name, fact in facts.buffers.items()}}
    return {name: fact.dtype for name, fact in found.items() if fact.dtype}


def _in_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Whole numbers stay what they are."""
    return tensor.double() if tensor.is_floating_point() else tensor


def run_parts(case: ModuleCase, modules: Sequence[nn.Module], parts: Sequence[Tensors]) -> tuple[Answers, Answers]:
    """What has the rows of the batch, one part below the other; and parameters' gradients, stacked.

    A gradient that reaches some parts alone is zero in the others.
    """
    answers = [run_module(case, module, part) for module, part in zip(modules, parts, strict=True)]
    likes = {name: tensor for answer in answers for name, tensor in answer.items()}
    stacked = case.stacked_names()
    rows, stacks = {}, {}
    with torch.no_grad():
        for name, like in likes.items():
            is_sum = name.startswith("grad.") and name.removeprefix("grad.") in case.parameter_names()
            given = [part.get(name.removeprefix("grad."), like) for part in parts]
            found = [
                answer[name] if name in answer else torch.zeros(each.shape, dtype=like.dtype)
                for answer, each in zip(answers, given, strict=True)
            ]
            if is_sum:
                stacks[name] = torch.stack(found)
            elif name in stacked:
                rows[name] = torch.stack(found)
            else:
                rows[name] = _below(found) if case.is_divided else found[0]
    return rows, stacks


def _below(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of all their rows."""
    return torch.cat(list(parts))


def _sum(stack: torch.Tensor) -> torch.Tensor:
    """Over dim 0; of one alone nothing is added."""
    return stack.sum(0) if len(stack) > 1 else stack[0]


def _exactly(case: ModuleCase, given: Tensors) -> dict[str, Found]:
    """What the module gives on integers, gradients of parts added up or averaged as the case says."""
    parts = split(case, given)
    rows, stacks = run_parts(case, [make_unsharded(case, part) for part in parts], parts)
    exact = {name: Found(tensor.detach().double(), None, EXACT) for name, tensor in rows.items()}
    if case.batch != MEAN_OF_PARTS:
        return exact | {name: Found(_sum(stack), None, EXACT) for name, stack in stacks.items()}
    averages = Averages(Operations(case.dtype, case.world_size, must_be_exact=True), case.num_parts, micro_batches=1)
    return exact | {name: _averaged(averages, stack) for name, stack in stacks.items()}


def _averaged(averages: Averages, stack: torch.Tensor) -> Found:
    """The mean over dim 0."""
    found, shape = averages.total(stack.reshape(len(stack), -1)), stack.shape[1:]
    allowed = None if found.allowed is None else found.allowed.reshape(shape)
    return replace(found, value=found.value.reshape(shape), allowed=allowed)


def _within_bounds(
    case: ModuleCase, given: Tensors, held: Sequence[HeldAt] = ()
) -> tuple[dict[str, Found], list[Forced]]:
    """What the module gives on real numbers, and how far a correct parallel one may be off.

    Given what was held of each part of the batch, the module's parts are judged by themselves.

    It runs in the case's own dtype: what a module computes may hang on that, as the default eps of nn.RMSNorm does.
    """
    ran = ran_within_bounds(case, given, held)
    with ran.counted:
        found = ran.rows | {name: reduced(case, stack) for name, stack in ran.stacks.items()}
    found = {name: scaled(ran.counted, tensor) for name, tensor in found.items()} if case.step else found
    return {name: within_bounds(ran.counted, tensor) for name, tensor in found.items()}, ran.runs


class Ran(NamedTuple):
    """What the module gives on each part of the batch.

    Attributes:
        rows, stacks: As of `run_parts`.
        counted: What counted the roundings; from now on it counts those of all ranks.
        runs: What is right of the boundaries of each part of the batch.
    """

    rows: Answers
    stacks: Answers
    counted: RunningError
    runs: list[Forced]


def ran_within_bounds(case: ModuleCase, given: Tensors, held: Sequence[HeldAt], buffers: Sequence[Tensors] = ()) -> Ran:
    """One forward and backward of each part of the batch, whose gradients have not been added up.

    Args:
        held: What was held of each part, to go on from; empty: nothing.
        buffers: What takes the place of the module's buffers in each part, by name.
    """
    from equivtest.kit.oracle.running import RunningError  # torch's decompositions take a second to import

    places = Places()
    num_ranks = math.prod(case.mesh_of_part) if held and case.is_divided else case.num_shares  # that compute a part
    counted = RunningError(arithmetic_of(case.dtype), num_ranks, places)
    ranged = [{name: _ranged(counted, each) for name, each in part.items()} for part in split(case, given)]
    modules = [call_builder(case.build).to(DTYPES[case.dtype]) for _ in ranged]
    for module, own in zip(modules, buffers, strict=False):
        _put_buffers(module, own)
    for module in modules:
        places.watch(module)
        _with_buffers(module, counted, case.facts.buffers)
    runs = [
        Forced(module, counted, each, past_open=case.past_open) for module, each in zip(modules, held, strict=False)
    ]
    try:
        with counted, TakesApart(), ExitStack() as stack:
            for run in runs:
                stack.enter_context(run)
            for module, part in zip(modules, ranged, strict=True):
                with_parameters(module, {name: part[name] for name in case.parameter_names()})
            rows, stacks = run_parts(case, modules, ranged)
            counted.roundings = replace(counted.roundings, ranks=case.world_size)
    except InexactData as error:
        raise Misuse(f"{case.build}, with {case.takes}: {error}{places.refused}: {_way_out(error)}") from error
    except Exception as error:  # an arbitrary module's, of a tensor that is not the usual one
        raise Misuse(
            f"{case.build}, with {case.takes}, cannot be followed operation by operation: "
            f"{type(error).__name__}: {error}{places.here()}"
        ) from error
    return Ran(rows, stacks, counted, runs)


def _way_out(error: InexactData) -> str:
    """What to do about an operation that cannot be followed."""
    if "at random" in str(error):
        return "leave it out of the module that is judged, call eval() on it, or set its probability to 0"
    if "item()" in str(error):
        return "decide on tensors, such as by torch.where, or on shapes, or judge the parts before and after it"
    return "leave it out of the module that is judged, or write a case family with an oracle of its own"


def _ranged(counted: RunningError, tensor: torch.Tensor) -> torch.Tensor:
    """Whole numbers stay what they are."""
    return counted.exactly(tensor) if tensor.is_floating_point() else tensor


def _with_buffers(module: nn.Module, counted: RunningError, names: Iterable[str]) -> None:
    """Has the buffers of these names know how far they may be off, as the forward writes to them."""
    floating = [name for name in names if module.get_buffer(name).is_floating_point()]
    _put_buffers(module, {name: counted.exactly(module.get_buffer(name).clone()) for name in floating})


def _put_buffers(module: nn.Module, buffers: Tensors) -> None:
    """Has the module hold these in the place of its own."""
    for name, buffer in buffers.items():
        owner, _, last = name.rpartition(".")
        module.get_submodule(owner)._buffers[last] = buffer


def within_bounds(counted: RunningError, tensor: torch.Tensor) -> Found:
    """What came out within its bound; whole numbers, and what hangs on nothing that was given, equal."""
    if isinstance(tensor, Ranged):
        return Found.within(counted.bounded(tensor))
    undecided = torch.full(tensor.shape, torch.inf, dtype=torch.float64) if counted.undecided else None
    return Found(tensor.detach().double(), undecided, counted.undecided or COPIED)


def reduced(case: ModuleCase, stack: torch.Tensor) -> torch.Tensor:
    """The parts' sum or mean, added up in any order, divided before or after."""
    return _sum(stack) / case.num_parts if case.batch == MEAN_OF_PARTS else _sum(stack)


def measured(tensors: Mapping[str, ExpectedTensor]) -> dict[str, ExpectedTensor]:
    """The same, where gradients that are zero but for roundings are measured by a small part of the others.

    A softmax does not change with what is added to all its terms, such as a bias of the keys: of such a parameter the
    gradient is zero in exact arithmetic, and staying within its bound shows that nothing was added to it.
    """
    gradients = [tensor.value.flatten() for name, tensor in tensors.items() if name.startswith("grad.")]
    if not gradients:
        return dict(tensors)
    scale = limits.ZERO_BESIDE * float(torch.cat(gradients).square().mean().sqrt())
    return {name: replace(each, scale=scale) if _is_zero(name, each) else each for name, each in tensors.items()}


def _is_zero(name: str, tensor: ExpectedTensor) -> bool:
    """Whether a gradient is no further from zero than it may be off."""
    return (
        name.startswith("grad.") and tensor.allowed is not None and bool((tensor.value.abs() <= tensor.allowed).all())
    )


def make_unsharded(case: ModuleCase, given: Tensors) -> nn.Module:
    """The unsharded module in float64, with the given parameters."""
    module = call_builder(case.build).double()
    return with_parameters(module, {name: given[name] for name in case.parameter_names()})


def run_module(case: ModuleCase, module: nn.Module, given: Tensors) -> Answers:
    """What the module gives and its backward leaves, by name: no gradient where none came."""
    inputs = {name: given[name].requires_grad_() if name in case.real_names() else given[name] for name in case.kinds()}
    positional = case.positional if case.inputs else tuple(inputs)
    outputs = named_outputs(call(module, positional, inputs), case.outputs, case.build)
    facts = case.facts
    roots = {name: outputs[name] for name in facts.roots}
    if roots:
        cotangents = [
            torch.ones_like(root) if facts.loss else given[cotangent_of(name)].reshape(root.shape).to(root.dtype)
            for name, root in roots.items()
        ]
        torch.autograd.backward(list(roots.values()), cotangents)
    grads = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.is_floating_point()}
    grads |= {name: inputs[name].grad for name in case.real_names()}
    found = {f"grad.{name}": grad for name, grad in grads.items() if grad is not None}
    return {**outputs, **found, **{f"buffer.{name}": module.get_buffer(name) for name in facts.buffers}}


def prove_exact(case: ModuleCase) -> int:
    """The bits that the sums of a case take at most, whatever its seeds.

    Raises:
        Misuse: an operation of the module could round the values of this case.
    """
    return _prove_exact(
        replace(case, values=((EXACT_MODE, 0),), poison="none", repeats=False, records=False, members=())
    )


@functools.lru_cache(maxsize=1024)
def _prove_exact(case: ModuleCase) -> int:
    """Proves exact every variant of what ids, masks and the like choose."""
    whole_numbers = [name for name, kind in case.kinds().items() if kind != REAL]
    variants = range(VARIANTS if whole_numbers else 1)
    return max(_bits_of(case, variant, whole_numbers) for variant in variants)


def _bits_of(case: ModuleCase, variant: int, whole_numbers: Sequence[str]) -> int:
    if case.facts.loss and case.batch == MEAN_OF_PARTS:
        raise Misuse(f"{case.build}: a mean of {case.num_parts} losses may round")
    places = Places()
    certificate = Certificate(DTYPES[case.dtype], places)
    drawn = draw(replace(case, values=((EXACT_MODE, variant),)), 0) if whole_numbers else {}
    magnitudes = {
        name: drawn[name]
        if name in whole_numbers
        else torch.full(case.shapes()[name], float(math.prod(bounds_of(case, name))), dtype=torch.float64)
        for name in case.given_names()
    }
    parts = split(case, magnitudes)
    modules = [make_unsharded(case, part) for part in parts]
    for module in modules:
        places.watch(module)
    try:
        with certificate:
            for stack in run_parts(case, modules, parts)[1].values():
                _sum(stack)
    except InexactData as error:
        raise Misuse(
            f"{case.build}: on integers up to {case.largest} in {case.dtype}, on {case.world_size} ranks, with "
            f"{case.takes}, {error}{places.refused}: take smaller sizes or leave this dtype out; a module that rounds "
            "is judged on real values, ('real', 0)"
        ) from error
    return certificate.bits_used
