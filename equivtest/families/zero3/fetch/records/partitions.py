"""Defects of a fetch that puts values in the wrong place."""

from __future__ import annotations

from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.zero3.fetch.defects.partitions:"

DEFECTS = (
    Defect(
        _HERE + "stride_by_unpadded_size",
        "zero3_fetch_all_reduce",
        "size not a multiple of the world size",
        "equals_unsharded",
        "value",
        FetchCase(world_size=2, parameters=((1,), (1,)), requires_grad=(True, True)),
        "one rank pads nothing, and only a parameter behind a padded one is displaced",
    ),
    Defect(
        _HERE + "overlapping_padding",
        "zero3_fetch_all_reduce",
        "uninitialised memory reaches a value",
        "equals_unsharded",
        "value",
        FetchCase(world_size=2, parameters=((1,), (1,)), requires_grad=(True, True)),
        "one rank pads nothing, and only a parameter behind a padded one meets its padding",
    ),
    Defect(
        _HERE + "first_partitions_swapped",
        "zero3_fetch_all_gather",
        "shard order",
        "equals_unsharded",
        "value",
        FetchCase(world_size=2, parameters=((2,),)),
        "two ranks need one element each",
    ),
    Defect(
        _HERE + "raises_where_all_is_padding",
        "zero3_fetch_all_gather",
        "ranks that diverge",
        "equals_unsharded",
        "raised",
        FetchCase(world_size=2, parameters=((1,),)),
        "one element leaves the second of two ranks without one",
    ),
    Defect(
        _HERE + "loses_requires_grad",
        "zero3_fetch_all_reduce",
        "flags",
        "does_not_touch_its_inputs",
        "touched",
        FetchCase(world_size=1, parameters=((1,),)),
        "one rank and one parameter that needs a gradient suffice",
    ),
)
