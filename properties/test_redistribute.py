"""Claims about DTensor.redistribute, on meshes of one axis and of two.

A failure here means that a tensor has other values under other placements. Look first at padding that was not removed,
then at the order of shards and of mesh axes, then at reductions.
"""

from __future__ import annotations

from equivtest.base.limits import DTYPES
from equivtest.families.redistribute.case import RedistributeCase
from equivtest.families.redistribute.strategy import ENUMERATION, redistribute_cases, refused_redistribute_cases
from equivtest.property import Property
from equivtest.verdicts.claims import (
    is_exact_without_reduction,
    is_the_identity_for_one_rank,
    refuses,
    repeats_itself,
    uses_only_collectives,
)
from equivtest.verdicts.judging import DEFAULT_CLAIMS

ALL_MODES = (("dense", 0), ("index", 1), ("special", 2), ("real", 3))


def on_all_ranks() -> tuple[RedistributeCase, ...]:
    """Returns every kind of move in every dtype, with shards that are even, uneven, and empty on the last rank."""
    moves = (
        ("shard(0)", "replicate"), ("shard(0)", "shard(1)"), ("partial(sum)", "shard(0)"),
        ("partial(avg)", "replicate"), ("partial(max)", "shard(1)"), ("replicate", "shard(0)"),
    )  # fmt: skip
    return tuple(
        RedistributeCase(
            world_size=world_size, dtype=dtype, shape=(size, size + world_size), source=(source,), target=(target,),
            values=ALL_MODES, records=True,
        )
        for world_size in (2, 3, 4)
        for dtype in DTYPES
        for size, (source, target) in zip(
            (2 * world_size, 2 * world_size - 1, 1, 1, world_size + 1, 1), moves, strict=True
        )
    )  # fmt: skip


def of_many_elements() -> tuple[RedistributeCase, ...]:
    """Returns sums of real numbers by all_reduce and reduce_scatter, which show errors that prefer one sign.

    There is none in float64, where the reference has the same errors.
    """
    return tuple(
        RedistributeCase(
            world_size=world_size, dtype=dtype, shape=(30, 40), source=("partial(sum)",), target=(target,),
            requires_grad=(), values=(("real", 0), ("real", 1)),
        )
        for world_size in (2, 3, 4)
        for dtype in DTYPES
        if dtype != "float64"
        for target in ("replicate", "shard(0)")
    )  # fmt: skip


redistribute = Property(
    subject="redistribute",
    statement="A DTensor redistributed to other placements is the same tensor, and so is its gradient.",
    source="torch/distributed/tensor/_api.py, DTensor.redistribute, from_local, to_local, full_tensor and "
    "distribute_tensor; torch/distributed/tensor/_redistribute.py (2.13.0)",
    cases=redistribute_cases,
    claims=(
        *DEFAULT_CLAIMS,
        is_exact_without_reduction,
        is_the_identity_for_one_rank,
        repeats_itself,
        uses_only_collectives,
    ),
    examples=(
        # A reduce_scatter of one element: the second rank gets nothing.
        RedistributeCase(world_size=2, source=("partial(sum)",), target=("shard(0)",), records=True),
        # Three elements over 2 x 2 ranks, 1, 1, 1 and none: they show which mesh axis shards first.
        RedistributeCase(world_size=4, mesh=(2, 2), shape=(3,), source=("replicate", "replicate"),
                         target=("shard(0)", "shard(0)")),
        # A layer in bfloat16 gathers its parameters in bfloat16, and adds their gradients in float32.
        RedistributeCase(world_size=2, shape=(3,), source=("shard(0)",), cotangent=("partial(sum)",),
                         forward_dtype="bfloat16"),
        RedistributeCase(world_size=3, road="local", shape=(5, 2), grad_source=("partial(sum)",)),
        *on_all_ranks(),
        # Nested shards of 5 over 2 x 2 ranks: 3 and 2, then 2, 1, 1 and 1; from there to the other dim.
        RedistributeCase(world_size=4, mesh=(2, 2), shape=(5, 3), source=("shard(0)", "shard(0)"),
                         target=("shard(1)", "shard(0)"), values=ALL_MODES),
        # Terms of both axes, reduced and scattered over a flattened mesh in one step.
        RedistributeCase(world_size=4, mesh=(2, 2), flattened=True, shape=(8, 3), source=("partial(avg)",) * 2,
                         target=("shard(0)", "shard(0)"), values=ALL_MODES),
        # An axis that stays partial while the other one is gathered.
        RedistributeCase(world_size=4, mesh=(2, 2), shape=(3, 2), source=("partial(sum)", "shard(0)"),
                         target=("partial(sum)", "replicate"), values=ALL_MODES),
        *of_many_elements(),
    ),
    enumeration=ENUMERATION,
    weight=4,
)  # fmt: skip

redistribute_refuses = Property(
    subject="redistribute",
    statement="Every rank refuses placements that the tensor or the mesh cannot have.",
    source="torch/distributed/tensor/_api.py, DTensor.redistribute: `placements` (2.13.0)",
    cases=refused_redistribute_cases,
    claims=(refuses,),
)
