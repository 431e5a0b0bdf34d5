"""Reductions of DTensors that are wrong in one way each."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from equivtest.cases.subject import Answers, Given
from equivtest.families.operators.case import OperatorCase
from equivtest.families.operators.case_forms import Arguments
from equivtest.families.operators.subject import call_torch, run_operator
from tests.defects.defect import Replacing, argument_of

wrong = Replacing("dtensor_operators")

Operands = tuple[DTensor, ...]
Results = tuple[Any, ...]


def _reduces_shards(case: OperatorCase, x: DTensor) -> bool:
    """True if the only axis of the mesh divides a dim that is reduced."""
    (placement, *others) = x.placements
    dims = case.dim if isinstance(case.dim, tuple) else range(x.dim()) if case.dim is None else (case.dim,)
    return not others and any(placement == Shard(int(dim) % x.dim()) for dim in dims)


@wrong(
    "a partial value taken for the whole",
    OperatorCase(world_size=2, operator="amax", operands=((2,),), placements=(("shard(0)",),)),
    "two ranks need one element each",
)
@argument_of(run_operator)
def amax_of_own_shard(case: OperatorCase, operands: Operands, arguments: Arguments) -> Results:
    """amax over the divided dim: each rank answers the largest element of its shard."""
    (x, *_) = operands
    local = x.to_local()
    if case.operator != "amax" or not _reduces_shards(case, x) or not local.numel():
        return call_torch(case, operands, arguments)
    found = torch.amax(local, **dict(arguments))  # type: ignore[arg-type]
    return (DTensor.from_local(found, x.device_mesh, [Replicate()], run_check=False),)


@wrong(
    "size not a multiple of the world size",
    OperatorCase(world_size=2, operator="mean", placements=(("shard(0)",),), values=(("real", 0),)),
    "one rank pads nothing; of two the second pads one element",
)
@argument_of(run_operator)
def mean_counts_padding(case: OperatorCase, operands: Operands, arguments: Arguments) -> Results:
    """mean over the dim that is divided: the sum over as many terms as even shards would have."""
    results, (x, *_) = call_torch(case, operands, arguments), operands
    if case.operator != "mean" or not _reduces_shards(case, x):
        return results
    size = x.shape[x.placements[0].dim]  # type: ignore[attr-defined]
    return (results[0] * (size / (-(-size // case.world_size) * case.world_size)),)


@wrong(
    "a reduction in fewer bits",
    OperatorCase(world_size=1, operator="sum", placements=(("shard(0)",),), values=(("real", 0),)),
    "one real number has more bits than bfloat16; a sum on one rank is reduced as well",
)
@argument_of(run_operator)
def sums_in_bfloat16(case: OperatorCase, operands: Operands, arguments: Arguments) -> Results:
    """sum over the dim that is divided: the ranks' sums are reduced in bfloat16."""
    (found,) = results = call_torch(case, operands, arguments)
    if case.operator != "sum" or found.placements != (Partial("sum"),):
        return results
    rounded = found.to(torch.bfloat16).redistribute(placements=[Replicate()])
    return (rounded.to(found.dtype),)


@wrong(
    "other collectives than documented",
    OperatorCase(world_size=2, operator="sum", placements=(("shard(0)",),), records=True),
    "two ranks share one element, which need not be gathered",
    claim="uses_only_collectives",
)
@argument_of(run_operator)
def gathers_before_it_sums(case: OperatorCase, operands: Operands, arguments: Arguments) -> Results:
    """sum over the dim that is divided: x is gathered, and each rank adds all of it."""
    (x, *_) = operands
    if case.operator == "sum" and _reduces_shards(case, x):
        x = x.redistribute(placements=[Replicate()])
    return call_torch(case, (x,), arguments)


@wrong(
    "wrong divisor or wrong group",
    OperatorCase(world_size=1, operator="amax of ties", operands=((2,),), requires_grad=(0,), values=(("dense", 4),)),
    "two of the elements are the largest",
    claim="gradients_equal_unsharded",
)
def ties_get_all(case: OperatorCase, mesh: DeviceMesh, given: Given) -> Answers:
    """amax: each of several equal maxima gets the whole cotangent, if it is whole."""
    answers = run_operator(case, mesh, given, call_torch)
    gradient = answers.get("grad.operand.0")
    if case.operator == "amax of ties" and isinstance(gradient, DTensor) and not case.cotangents:
        whole = gradient.sign() * case.world_size  # as large as every cotangent
        assert isinstance(whole, DTensor)
        answers["grad.operand.0"] = whole
    return answers
