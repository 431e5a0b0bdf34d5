"""Defects of reductions and softmaxes."""

from __future__ import annotations

from equivtest.families.reduction.case import ReductionCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.reduction.defects:"

DEFECTS = (
    Defect(
        _HERE + "amax_of_own_shard",
        "reduction",
        "a partial value taken for the whole",
        "equals_unsharded",
        "value",
        ReductionCase(world_size=2, op="amax", shape=(2,), layout="shard(0)", requires_grad=()),
        "two ranks need one element each",
    ),
    Defect(
        _HERE + "mean_of_means",
        "reduction",
        "size not a multiple of the world size",
        "equals_unsharded",
        "value",
        ReductionCase(world_size=2, op="mean", layout="shard(0)", requires_grad=()),
        "one element, and none on the second rank, whose mean is taken for zero",
    ),
    Defect(
        _HERE + "mean_counts_padding",
        "reduction",
        "size not a multiple of the world size",
        "equals_unsharded",
        "value",
        ReductionCase(world_size=2, op="mean", layout="shard(0)", requires_grad=()),
        "one rank pads nothing; of two the second pads one element",
    ),
    Defect(
        _HERE + "norms_added",
        "reduction",
        "a partial value taken for the whole",
        "equals_unsharded",
        "value",
        ReductionCase(world_size=2, op="norm", shape=(2,), layout="shard(0)", requires_grad=()),
        "two ranks need one element each",
    ),
    Defect(
        _HERE + "softmax_of_own_shard",
        "reduction",
        "a partial value taken for the whole",
        "equals_unsharded",
        "value",
        ReductionCase(world_size=2, op="softmax", shape=(2,), layout="shard(0)", requires_grad=()),
        "two ranks need one element each",
    ),
    Defect(
        _HERE + "sums_in_bfloat16",
        "reduction",
        "a reduction in fewer bits",
        "equals_unsharded",
        "value",
        ReductionCase(world_size=1, layout="shard(0)", requires_grad=(), values=(("real", 0),)),
        "one real number has more bits than bfloat16; a sum on one rank is reduced as well",
    ),
    Defect(
        _HERE + "ties_get_all",
        "reduction",
        "wrong divisor or wrong group",
        "gradients_equal_unsharded",
        "value",
        ReductionCase(world_size=1, op="amax", shape=(3,), values=(("dense", 6),)),
        "two of the elements are the largest; with the first seed it takes four elements",
    ),
    Defect(
        _HERE + "gathers_before_it_sums",
        "reduction",
        "other collectives than documented",
        "uses_only_collectives",
        "collectives",
        ReductionCase(world_size=2, layout="shard(0)", requires_grad=(), records=True),
        "two ranks share one element, whose all_gather is no all_reduce",
    ),
)
