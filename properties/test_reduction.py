"""Claims about reductions and softmaxes of DTensors.

A failure here means that a sum, mean, largest element, norm or softmax depends on where elements
live: look first at shards of unequal size, then at how a partial result is interpreted.
"""

from __future__ import annotations

from equivtest.families.reduction.case import ReductionCase
from equivtest.families.reduction.strategy import reduction_cases
from equivtest.property import Property
from equivtest.verdicts.claims import repeats_itself, uses_only_collectives
from equivtest.verdicts.judging import DEFAULT_CLAIMS

reduction = Property(
    subject="reduction",
    statement="A reduction or softmax of a DTensor, and its gradient, equal those of the whole tensor.",
    source="torch/distributed/tensor/_ops/_math_ops.py, common_reduction_strategy and softmax_strategy (2.13.0)",
    cases=reduction_cases,
    claims=(*DEFAULT_CLAIMS, repeats_itself, uses_only_collectives),
    examples=(
        # Means of 3, 3 and 1 rows are not the mean of seven.
        *(
            ReductionCase(
                world_size=3,
                op=op,
                shape=(7, 4),
                layout="shard(0)",
                records=True,
                values=(("dense", 0), ("real", 1), ("real", 2)),
            )
            for op in ("sum", "mean", "amax", "norm", "softmax", "log_softmax")
        ),
        ReductionCase(world_size=4, op="sum", shape=(5, 2), layout="shard(0)", values=(("dense", 0), ("real", 1))),
    ),
    weight=3,
)
