"""What a module of anybody's own gives: the unsharded one in float64, on data that nothing rounds or on real ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from equivtest import limits
from equivtest.errors import Misuse
from equivtest.families.module.case import (
    EXACT_MODE,
    MEAN_OF_PARTS,
    REAL_MODE,
    ModuleCase,
    call_builder,
    with_parameters,
)
from equivtest.families.module.values import bounds_of
from equivtest.kit.oracle import expect
from equivtest.kit.oracle.averages import Averages
from equivtest.kit.oracle.certificate import Certificate
from equivtest.kit.oracle.declared import arithmetic_of
from equivtest.kit.oracle.exact import InexactData
from equivtest.kit.oracle.expected import Expected, ExpectedTensor
from equivtest.kit.oracle.operations import Found, Operations
from equivtest.kit.values import draw
from equivtest.tensors import DTYPES, slice_local

EXACT = "equal: the unsharded module in float64, no operation of which can round these values"

Tensors = Mapping[str, torch.Tensor]
Answers = dict[str, torch.Tensor]


@expect.register
def expect_module(case: ModuleCase, index: int) -> Expected:
    """Output, parameters and gradients of the unsharded module; of a divided batch it runs on each part by itself.

    Raises:
        Misuse: an operation of the module could round the integers of this case, or is one of which no bound is known.
    """
    drawn = draw(case, index)
    given = {name: tensor.double() for name, tensor in drawn.items()}
    if case.values[index][0] == REAL_MODE:
        expected = _expected(case, given, _within_bounds(case, drawn), {})
        return replace(expected, tensors=measured(expected.tensors))
    bits_used = prove_exact(case)
    return _expected(case, given, _exactly(case, given), {"all": bits_used})


def _expected(case: ModuleCase, given: Tensors, found: Mapping[str, Found], bits_used: Mapping[str, int]) -> Expected:
    """Every answer of the case: what is not found is zero, as what no gradient reaches, and parameters are copies."""
    tensors, layouts, shapes = {}, case.layouts(), case.shapes()
    for name in case.answer_names():
        zeros = Found(torch.zeros(shapes[name], dtype=torch.float64), None, EXACT)
        right = found.get(name, zeros)
        if name.startswith("param."):
            right = Found.copy_of(given[name.removeprefix("param.")])
        tensors[name] = ExpectedTensor(
            value=right.value,
            allowed=right.allowed,
            layout=layouts[name],
            dtype=case.dtype,
            derivation=right.derivation,
            requires_grad=name == "output" or name.startswith("param.") or None,
            may_be_none=name.startswith("grad.") and name not in found,
        )
    return Expected(tensors, bits_used)


def split(case: ModuleCase, given: Tensors) -> list[dict[str, torch.Tensor]]:
    """What the unsharded module runs on: copies of all, or of what each rank is handed of a divided batch."""
    layouts, num_parts = case.layouts(), case.world_size if case.is_divided else 1
    return [
        {name: slice_local(tensor, layouts[name], case.mesh_shape, rank) for name, tensor in given.items()}
        for rank in range(num_parts)
    ]


def run_parts(modules: Sequence[nn.Module], parts: Sequence[Tensors], *, divided: bool) -> tuple[Answers, Answers]:
    """What has the rows of x, one part below the other; and parameters' gradients, stacked.

    A gradient that reaches some parts alone is zero in the others.
    """
    answers = [run_module(module, part) for module, part in zip(modules, parts, strict=True)]
    likes = {name: tensor for answer in answers for name, tensor in answer.items()}
    rows, stacks = {}, {}
    with torch.no_grad():
        for name, like in likes.items():
            shapes = [part["x"].shape if name == "grad.x" else like.shape for part in parts]
            found = [
                answer[name] if name in answer else torch.zeros(shape, dtype=like.dtype)
                for answer, shape in zip(answers, shapes, strict=True)
            ]
            if name in ("output", "grad.x"):
                rows[name] = _below(found) if divided else found[0]
            else:
                stacks[name] = torch.stack(found)
    return rows, stacks


def _below(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of all their rows, a number as one row."""
    return torch.cat([part if part.dim() else part.unsqueeze(0) for part in parts])


def _sum(stack: torch.Tensor) -> torch.Tensor:
    """Over dim 0; of one alone nothing is added."""
    return stack.sum(0) if len(stack) > 1 else stack[0]


def _exactly(case: ModuleCase, given: Tensors) -> dict[str, Found]:
    """What the module gives on integers, gradients of parts added up or averaged as the case says."""
    parts = split(case, given)
    rows, stacks = run_parts([make_unsharded(case, part) for part in parts], parts, divided=case.is_divided)
    exact = {name: Found(tensor.detach(), None, EXACT) for name, tensor in rows.items()}
    if case.batch != MEAN_OF_PARTS:
        return exact | {name: Found(_sum(stack), None, EXACT) for name, stack in stacks.items()}
    averages = Averages(Operations(case.dtype, case.world_size, must_be_exact=True), case.world_size, micro_batches=1)
    return exact | {name: _averaged(averages, stack) for name, stack in stacks.items()}


def _averaged(averages: Averages, stack: torch.Tensor) -> Found:
    """The mean over dim 0."""
    found, shape = averages.total(stack.reshape(len(stack), -1)), stack.shape[1:]
    allowed = None if found.allowed is None else found.allowed.reshape(shape)
    return replace(found, value=found.value.reshape(shape), allowed=allowed)


def _within_bounds(case: ModuleCase, given: Tensors) -> dict[str, Found]:
    """What the module gives on real numbers, and how far a correct parallel one may be off.

    It runs in the case's own dtype: what a module computes may hang on that, as the default eps of nn.RMSNorm does.

    Source: torch.nn.attention.sdpa_kernel (2.13.0), so that attention is taken apart into products and softmaxes.
    """
    from equivtest.kit.oracle.running import RunningError  # torch's decompositions take a second to import

    counted = RunningError(arithmetic_of(case.dtype), case.world_size)
    ranged = [{name: counted.exactly(each) for name, each in part.items()} for part in split(case, given)]
    modules = [call_builder(case.build).to(DTYPES[case.dtype]) for _ in ranged]
    try:
        with counted, sdpa_kernel(SDPBackend.MATH):
            for module, part in zip(modules, ranged, strict=True):
                with_parameters(module, {name: part[name] for name in case.parameter_names()})
            rows, stacks = run_parts(modules, ranged, divided=case.is_divided)
            found = rows | {name: _reduced(case, stack) for name, stack in stacks.items()}
    except InexactData as error:
        raise Misuse(
            f"{case.build}, with x of shape {case.x_shape}: {error}: leave it out of the module that is judged, or "
            "write a case family with an oracle of its own"
        ) from error
    except Exception as error:  # an arbitrary module's, of a tensor that is not the usual one
        raise Misuse(
            f"{case.build}, with x of shape {case.x_shape}, cannot be followed operation by operation: "
            f"{type(error).__name__}: {error}"
        ) from error
    return {name: Found.within(counted.bounded(tensor)) for name, tensor in found.items()}


def _reduced(case: ModuleCase, stack: torch.Tensor) -> torch.Tensor:
    """The parts' sum or mean, added up in any order, divided before or after."""
    return _sum(stack) / case.world_size if case.batch == MEAN_OF_PARTS else _sum(stack)


def measured(tensors: Mapping[str, ExpectedTensor]) -> dict[str, ExpectedTensor]:
    """The same, where gradients that are zero but for roundings are measured by a small part of the others.

    A softmax does not change with what is added to all its terms, such as a bias of the keys: of such a parameter the
    gradient is zero in exact arithmetic, and staying within its bound shows that nothing was added to it.
    """
    gradients = [tensor.value.flatten() for name, tensor in tensors.items() if name.startswith("grad.")]
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


def run_module(module: nn.Module, given: Tensors) -> Answers:
    """What the module gives and its backward leaves, by name: no gradient where none came."""
    x = given["x"].requires_grad_()
    output: torch.Tensor = module(x)
    torch.autograd.backward(output, given["cotangent"].reshape(output.shape))
    grads = {name: parameter.grad for name, parameter in module.named_parameters()} | {"x": x.grad}
    return {"output": output} | {f"grad.{name}": grad for name, grad in grads.items() if grad is not None}


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
    certificate = Certificate(DTYPES[case.dtype])
    magnitudes = {
        name: torch.full(case.shapes()[name], float(math.prod(bounds_of(case, name))), dtype=torch.float64)
        for name in case.given_names()
    }
    parts = split(case, magnitudes)
    modules = [make_unsharded(case, part) for part in parts]
    try:
        with certificate:
            for stack in run_parts(modules, parts, divided=case.is_divided)[1].values():
                _sum(stack)
    except InexactData as error:
        raise Misuse(
            f"{case.build}: on integers up to {case.largest} in {case.dtype}, on {case.world_size} ranks, with x of "
            f"shape {case.x_shape}, {error}: take smaller sizes or leave this dtype out; a module that rounds "
            "is judged on real values, ('real', 0)"
        ) from error
    return certificate.bits_used
