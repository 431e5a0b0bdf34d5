"""Claims about the smallest family, which CONTRIBUTING.md walks through.

A failure here means that torch multiplies a sharded tensor and a whole tensor by different numbers.
"""

from __future__ import annotations

from equivtest.families.scale.case import ScaleCase
from equivtest.families.scale.strategy import scale_cases
from equivtest.property import Property
from equivtest.verdicts.claims import is_exact_without_reduction, repeats_itself
from equivtest.verdicts.judging import DEFAULT_CLAIMS

scale = Property(
    subject="scale",
    statement="A DTensor times a number is the whole tensor times that number, and so is its gradient.",
    source="torch/distributed/tensor/_ops/_pointwise_ops.py, pointwise_strategy (2.13.0)",
    cases=scale_cases,
    claims=(*DEFAULT_CLAIMS, is_exact_without_reduction, repeats_itself),
    examples=(
        # Five rows over four ranks: 2, 2, 1 and none.
        ScaleCase(world_size=4, shape=(5, 3), factor=-3, values=(("dense", 0), ("real", 1))),
    ),
    without_collectives="each rank multiplies the elements of its shard",
)
