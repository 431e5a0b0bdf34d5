"""Defects of the collectives of a linear layer."""

from __future__ import annotations

from equivtest.families.linear.case import LinearCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.linear.defects.collectives:"

DEFECTS = (
    Defect(
        _HERE + "output_reduced_whole",
        "rowwise_linear",
        "other collectives than documented",
        "uses_only_collectives",
        "collectives",
        LinearCase(
            world_size=2, style="rowwise", in_features=2, output_layout="shard(0)", requires_grad=(), records=True
        ),
        "one rank reduces nothing, and torch reduces nothing where there are fewer in features than ranks",
    ),
)
