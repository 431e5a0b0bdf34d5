"""Reductions and softmaxes that are wrong in one way each."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from equivtest.cases.subject import Answers, Given
from equivtest.families.reduction.case import SOFTMAXES, ReductionCase
from equivtest.families.reduction.subject import Reduce, reduce_by_torch, run_reduction
from equivtest.tensors import Placed
from tests.defects.defect import Replacing, argument_of

wrong = Replacing("reduction")


def _of_own_shard(case: ReductionCase, x: torch.Tensor, op: str) -> torch.Tensor:
    """Treats the reduction of each rank's shard as one operand of a reduction by `op`, or as the whole."""
    assert isinstance(x, DTensor)
    local, shape = x.to_local(), case.shapes()["output"]
    found = reduce_by_torch(case, local).reshape(shape) if local.numel() else local.new_zeros(shape)
    placement = Partial(op) if op else Replicate()
    return DTensor.from_local(found, x.device_mesh, [placement], run_check=False)


def _of_own_shards(wrong: str, op: str) -> Reduce:
    """The reduction `wrong` over a divided dim from the ranks' own by `op`, or one rank's own; the others as torch."""

    def reduce(case: ReductionCase, x: torch.Tensor) -> torch.Tensor:
        own = case.op == wrong and case.reduces_shards
        return _of_own_shard(case, x, op) if own else reduce_by_torch(case, x)

    return reduce


@wrong(
    "a partial value taken for the whole",
    ReductionCase(world_size=2, op="amax", shape=(2,), layout="shard(0)", requires_grad=()),
    "two ranks need one element each",
)
def amax_of_own_shard(case: ReductionCase, mesh: DeviceMesh, given: Given) -> Answers:
    """amax over the divided dim: each rank answers the largest element of its own shard."""
    return run_reduction(case, mesh, given, _of_own_shards("amax", ""))


@wrong(
    "size not a multiple of the world size",
    ReductionCase(world_size=2, op="mean", layout="shard(0)", requires_grad=()),
    "one element, and none on the second rank, which counts its mean as zero",
)
def mean_of_means(case: ReductionCase, mesh: DeviceMesh, given: Given) -> Answers:
    """mean over the dim that is divided: the average of the ranks' own means, however many terms each has."""
    return run_reduction(case, mesh, given, _of_own_shards("mean", "avg"))


@wrong(
    "size not a multiple of the world size",
    ReductionCase(world_size=2, op="mean", layout="shard(0)", requires_grad=()),
    "one rank pads nothing; of two the second pads one element",
)
@argument_of(run_reduction)
def mean_counts_padding(case: ReductionCase, x: torch.Tensor) -> torch.Tensor:
    """mean over the dim that is divided: the sum over as many terms as even shards would have."""
    found = reduce_by_torch(case, x)
    if case.op != "mean" or not case.reduces_shards:
        return found
    size = case.shape[case.layouts()["x"].placements[0].dim]  # type: ignore[union-attr]
    padded = -(-size // case.world_size) * case.world_size
    return found if padded == size else found * (size / padded)


@wrong(
    "a partial value taken for the whole",
    ReductionCase(world_size=2, op="norm", shape=(2,), layout="shard(0)", requires_grad=()),
    "two ranks need one element each",
)
def norms_added(case: ReductionCase, mesh: DeviceMesh, given: Given) -> Answers:
    """norm over the dim that is divided: the sum of the ranks' norms."""
    return run_reduction(case, mesh, given, _of_own_shards("norm", "sum"))


@wrong(
    "a partial value taken for the whole",
    ReductionCase(world_size=2, op="softmax", shape=(2,), layout="shard(0)", requires_grad=()),
    "two ranks need one element each",
)
@argument_of(run_reduction)
def softmax_of_own_shard(case: ReductionCase, x: torch.Tensor) -> torch.Tensor:
    """softmax over the dim that is divided: each rank's elements add up to one."""
    if case.op not in SOFTMAXES or not case.reduces_shards:
        return reduce_by_torch(case, x)
    assert isinstance(x, DTensor)
    own = reduce_by_torch(case, x.to_local())
    return DTensor.from_local(
        own, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.contiguous().stride()
    )


@wrong(
    "a reduction in fewer bits",
    ReductionCase(world_size=1, layout="shard(0)", requires_grad=(), values=(("real", 0),)),
    "one real number has more bits than bfloat16; a sum on one rank is reduced as well",
)
@argument_of(run_reduction)
def sums_in_bfloat16(case: ReductionCase, x: torch.Tensor) -> torch.Tensor:
    """sum over the dim that is divided: the ranks' sums are reduced in bfloat16."""
    found = reduce_by_torch(case, x)
    if case.op == "sum" and isinstance(found, DTensor) and found.placements == (Partial("sum"),):
        rounded = found.to(torch.bfloat16)
        assert isinstance(rounded, DTensor)
        return rounded.redistribute(placements=[Replicate()]).to(x.dtype)
    return found


@wrong(
    "other collectives than documented",
    ReductionCase(world_size=2, layout="shard(0)", requires_grad=(), records=True),
    "two ranks share one element, whose all_gather is no all_reduce",
    claim="uses_only_collectives",
)
@argument_of(run_reduction)
def gathers_before_it_sums(case: ReductionCase, x: torch.Tensor) -> torch.Tensor:
    """sum over the dim that is divided: x is gathered, and each rank adds all of it."""
    if case.op == "sum" and case.reduces_shards:
        assert isinstance(x, DTensor)
        x = x.redistribute(placements=[Replicate()])
    return reduce_by_torch(case, x)


@wrong(
    "wrong divisor or wrong group",
    ReductionCase(world_size=1, op="amax", shape=(3,), values=(("dense", 6),)),
    "two of the elements are the largest; with the first seed it takes four elements",
    claim="gradients_equal_unsharded",
)
def ties_get_all(case: ReductionCase, mesh: DeviceMesh, given: Given) -> Answers:
    """amax: each of several equal maxima gets the whole cotangent, if its dim is divided or no dim is."""
    answers = run_reduction(case, mesh, given, reduce_by_torch)
    gradient = answers.get("grad.x")
    has_whole_cotangent = case.reduces_shards or case.layout == "replicate"
    if case.op == "amax" and has_whole_cotangent and isinstance(gradient, Placed):
        kept = [1 if dim in case.dims else size for dim, size in enumerate(case.shape)]
        cotangent = given["cotangent"].reshape(kept).expand(gradient.local.shape)
        answers["grad.x"] = Placed(torch.where(gradient.local != 0, cotangent, 0.0), gradient.layout)
    return answers
