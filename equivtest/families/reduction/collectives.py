"""The collectives of a reduction or softmax, derived from the layout of its operand."""

from __future__ import annotations

from dataclasses import replace

from equivtest.families.reduction.case import SOFTMAXES, ReductionCase
from equivtest.layout import Partial, Placement, Replicate, Shard
from equivtest.oracle.collectives import Collectives, expected_collectives, redistribute
from equivtest.tensors import DTYPES

_COUNT_BYTES = 8  # of an int64


@expected_collectives.register
def reduction_collectives(case: ReductionCase, rank: int) -> Collectives:
    """Lists collectives: the operand or its result made whole, and tensors that the backward needs again.

    Along a divided dim a sum, norm or largest element is computed on each rank, with an all_reduce of the
    results.  So is a mean, except for uneven shards, which are gathered like those of a softmax.  Along
    other dims the result is divided like the operand, and gathered.  A partial operand is added
    first, except for a sum, whose result is partial instead.

    The gradient goes back whole, and each rank keeps its part.  Its operands
    are made whole at each use: the norm twice, to divide by it and to look for zeros; the largest once,
    and the number of equally large elements, in int64, once; a partial operand itself once more.

    Source: common_reduction_strategy and softmax_strategy in torch/distributed/tensor/_ops/_math_ops.py;
    norm_backward and scale_grad_by_count in torch/csrc/autograd/FunctionsManual.cpp (2.13.0).
    """
    output, made = case.shapes()["output"], _made(case)
    calls = [*redistribute(case, case.shape, case.placement, _taken(case), "forward")]
    calls += redistribute(case, output, made, Replicate(), "forward")
    if not case.requires_grad or case.op not in ("amax", "norm"):
        return tuple(calls)
    if case.is_partial:
        return (*calls, *(redistribute(case, case.shape, Partial(), Replicate(), "backward") * (case.op == "amax")))
    again = redistribute(case, output, made, Replicate(), "backward") if case.reduces_shards else []
    size_bytes = DTYPES[case.dtype].itemsize
    counted = [replace(call, size_bytes=call.size_bytes // size_bytes * _COUNT_BYTES) for call in again]
    return (*calls, *again, *(counted if case.op == "amax" else again))


def _taken(case: ReductionCase) -> Placement:
    if case.is_partial:
        return case.placement if case.op == "sum" else Replicate()
    if case.reduces_shards and (case.op in SOFTMAXES or (case.op == "mean" and case.shard_kind != "even")):
        return Replicate()
    return case.placement


def _made(case: ReductionCase) -> Placement:
    taken = _taken(case)
    if not isinstance(taken, Shard):
        return taken
    if case.reduces_shards:
        return Partial()
    gone = 0 if case.keepdim or case.op in SOFTMAXES else sum(dim < taken.dim for dim in case.dims)
    return Shard(taken.dim - gone)
