"""Claims about dropout of sharded and of replicated activations.

A failure here means that a parallel model is regularized in another way. Look first at how the ranks' generators are
seeded, then at the mask that the backward takes.
"""

from __future__ import annotations

from equivtest.base import limits
from equivtest.families.dropout.case import DropoutCase
from equivtest.families.dropout.strategy import dropout_cases
from equivtest.property import Property
from equivtest.verdicts.claims import (
    drops_at_random,
    is_exact_without_reduction,
    repeats_itself,
    uses_only_collectives,
)
from equivtest.verdicts.judging import DEFAULT_CLAIMS


def on_all_ranks() -> tuple[DropoutCase, ...]:
    """Returns cases in every dtype whose sequences are sharded evenly, unevenly, and with an empty shard.

    In float64 and bfloat16 the backward computes the dropout again, as a backward within the backward in bfloat16.
    """
    return tuple(
        DropoutCase(
            world_size=world_size, dtype=dtype, style="sequence_parallel", shape=(length, 64), layout="shard(0)",
            values=(("dense", 0), ("real", 1)),
            recomputed=dtype in ("float64", "bfloat16"), reentrant=dtype == "bfloat16",
        )
        for world_size in (2, 3, 4)
        for dtype in limits.DTYPES
        for length in (world_size, 2 * world_size - 1, world_size + 1 if world_size > 2 else 1)
    )  # fmt: skip


parallel_dropout = Property(
    subject="parallel_dropout",
    statement="nn.Dropout of a DTensor drops at random, and all other elements equal the unsharded ones.",
    source="torch/distributed/tensor/parallel/style.py, class SequenceParallel; torch/nn/modules/dropout.py; "
    "torch/distributed/tensor/_random.py (2.13.0)",
    cases=dropout_cases,
    claims=(*DEFAULT_CLAIMS, is_exact_without_reduction, repeats_itself, drops_at_random, uses_only_collectives),
    examples=(
        *on_all_ranks(),
        # Drops nothing, then everything.
        DropoutCase(world_size=2, shape=(2, 3), layout="shard(0)", p=0.0, values=(("special", 0), ("dense", 1)),
                    style="sequence_parallel"),
        DropoutCase(world_size=2, shape=(2, 3), layout="shard(0)", p=1.0, values=(("dense", 0), ("real", 1))),
        # A quarter, whose reciprocal of 3/4 is rounded, on replicas of 256 elements.
        DropoutCase(world_size=2, shape=(4, 64), p=0.25, seeding="same", values=(("dense", 0), ("real", 1)),
                    records=True),
    ),
    weight=2,
    without_collectives="each rank drops elements of its shard, and the seed comes with the case",
)  # fmt: skip
