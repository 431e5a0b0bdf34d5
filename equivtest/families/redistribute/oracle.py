"""Computes one redistributed tensor: the same values under another layout, and the reductions of partial tensors.

Values without a reduction are copied, so every bit is known. `equivtest.oracle.operands` computes the reductions. The
gradient belongs to the tensor, not to its terms on the ranks. So for any reduction the gradient is the unchanged
cotangent.

Source: DTensor.redistribute and DTensor.from_local in torch/distributed/tensor/_api.py,
_redistribute_backward in torch/distributed/tensor/_redistribute.py (2.13.0).
"""

from __future__ import annotations

import itertools
import math

import torch

from equivtest.base.collective import Collective
from equivtest.cases.operands import partial_axes
from equivtest.cases.values import draw
from equivtest.families.redistribute.case import REAL_MODE, RedistributeCase
from equivtest.families.redistribute.prepared.case import PreparedCase
from equivtest.layout import Partial, Replicate, parse_placement
from equivtest.oracle import expect
from equivtest.oracle.collectives import Collectives, distribute, expected_collectives, redistribute
from equivtest.oracle.expected import COPIED, Expected, ExpectedTensor
from equivtest.oracle.operands import Reduced, bound_reduction, reduce_exactly
from equivtest.tensors import DTYPES


@expect.register
def expect_redistribute(case: RedistributeCase, index: int) -> Expected:
    """Returns x as the output and the cotangent as the gradient of x, each exact or with the bound of a reduction."""
    given = draw(case, index)
    pairs = {"output": "x", "grad.x": "cotangent"}
    found = {name: reduce_operands(case, pairs[name], given[pairs[name]], index) for name in case.answer_names()}
    tensors = {
        name: ExpectedTensor(
            value=reduced.value,
            allowed=reduced.allowed,
            layout=case.layouts()[name],
            dtype=_dtype(case, name),
            derivation=reduced.derivation,
            requires_grad=bool(case.requires_grad) if name == "output" else None,
            is_symmetric=reduced.is_symmetric,
            bits=_bits(case, name, reduced, index),
            is_sum=case.reduction(pairs[name])[0] in ("sum", "avg"),
        )
        for name, reduced in found.items()
    }
    return Expected(tensors, {name: reduced.bits_used for name, reduced in found.items() if reduced.bits_used})


def _dtype(case: RedistributeCase, name: str) -> str:
    return case.output_dtype if name == "output" else case.dtype


def _bits(case: RedistributeCase, name: str, reduced: Reduced, index: int) -> torch.Tensor | None:
    if reduced.bits is None or not case.fixes_bits_of(name, index):
        return None
    return reduced.bits.to(DTYPES[_dtype(case, name)])


def reduce_operands(case: RedistributeCase, name: str, given: torch.Tensor, index: int) -> Reduced:
    """Reduces `given`, which has one term for each rank along the axes on which 'x' or 'cotangent' is partial.

    The terms are converted first: x to `forward_dtype`, and the cotangent to `backward_dtype` or to the dtype of x.
    """
    dtype = case.output_dtype if name == "x" else case.backward_dtype or case.dtype
    given = given.to(DTYPES[dtype])
    op, num_operands = case.reduction(name)
    if name == "cotangent" and case.divides_gradient:
        return _divided(case, given.to(DTYPES[case.dtype]))
    if not op:
        last = given if name == "x" else given.to(DTYPES[case.dtype])
        return Reduced(last.double(), last, None, COPIED)
    operands = given.reshape(num_operands, *case.shape)
    axes = [case.mesh_shape[axis] for axis in partial_axes(case.operand_layout(name))]
    if case.values[index][0] == REAL_MODE and op in ("sum", "avg"):
        if name == "cotangent":  # its sum is converted to the dtype of x last, and from_local adds in that dtype
            operands = operands.to(DTYPES[case.dtype])
        return bound_reduction(operands, op, len(axes))
    return reduce_exactly(name, operands, op, axes)


def _divided(case: RedistributeCase, given: torch.Tensor) -> Reduced:
    """Bounds a gradient that is divided among the ranks, as an average of equal terms."""
    axes = [case.mesh_shape[axis] for axis in partial_axes(case.gradient_layout)]
    return bound_reduction(given.expand(math.prod(axes), *given.shape), "avg", len(axes))


@expected_collectives.register
def redistribute_collectives(case: RedistributeCase, rank: int) -> Collectives:
    """Returns the collectives that distribute and redistribute x, and redistribute the cotangent back, on one axis.

    Source: DTensor.redistribute, its docstring, and distribute_tensor, `src_data_rank`, in
    torch/distributed/tensor/_api.py (2.13.0).
    """
    calls: list[Collective] = []
    source = case.operand_layout("x").placements[0]
    if case.road == "distribute":
        calls.append(distribute(case, rank, case.shape, source))
    calls += redistribute(case, case.shape, source, case.layouts()["output"].placements[0], "forward")
    if case.requires_grad:
        cotangent, gradient = case.cotangent_layout.placements[0], case.gradient_layout.placements[0]
        calls += redistribute(case, case.shape, cotangent, gradient, "backward")
    return tuple(calls)


@expected_collectives.register
def prepared_collectives(case: PreparedCase, rank: int) -> Collectives:
    """Returns the collectives for x in the forward and for its cotangent in the backward.

    The cotangent passes through `PreparedCase.steps` in reverse order, with replicated instead of partial placements.

    Source: as for `redistribute_collectives`; PrepareModuleInput and PrepareModuleOutput in
    torch/distributed/tensor/parallel/style.py (2.13.0).
    """
    steps = [parse_placement(text) for text in case.steps]
    calls: list[Collective] = []
    for old, new in itertools.pairwise(steps):
        calls += redistribute(case, case.shape, old, new, "forward")
    if case.requires_grad:
        back = [Replicate() if isinstance(step, Partial) else step for step in reversed(steps)]
        for old, new in itertools.pairwise(back):
            calls += redistribute(case, case.shape, old, new, "backward")
    return tuple(calls)
