"""Defects of collectives: of another kind, over another group, or more of them."""

from __future__ import annotations

from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.zero3.fetch.defects.collectives:"

DEFECTS = (
    Defect(
        _HERE + "global_rank_for_mesh_rank",
        "zero3_fetch_all_gather",
        "wrong divisor or wrong group",
        "equals_unsharded",
        "value",
        FetchCase(world_size=1, parameters=((1,),), members=(1,)),
        "rank 0 of a mesh must be another process than 0, which takes a second process, not a second rank",
    ),
    Defect(
        _HERE + "world_group_for_mesh_group",
        "zero3_fetch_all_reduce",
        "wrong divisor or wrong group",
        "equals_unsharded",
        "value",
        FetchCase(world_size=1, parameters=((1,),), members=(1,)),
        "two meshes of one rank each add up what is the other's",
    ),
    Defect(
        _HERE + "parameters_averaged",
        "zero3_fetch_all_reduce",
        "wrong divisor or wrong group",
        "equals_unsharded",
        "value",
        FetchCase(world_size=2, parameters=((1,),)),
        "one rank's sum is its average",
    ),
    Defect(
        _HERE + "barrier_after_fetch",
        "zero3_fetch_all_gather",
        "other collectives than documented",
        "uses_only_collectives",
        "collectives",
        FetchCase(world_size=1, parameters=((1,),), collective="all_gather", records=True),
        "one rank calls the barrier too",
    ),
    Defect(
        _HERE + "one_collective_per_parameter",
        "zero3_fetch_all_gather",
        "other collectives than documented",
        "uses_only_collectives",
        "collectives",
        FetchCase(
            world_size=1, parameters=((1,), (1,)), requires_grad=(True, True), collective="all_gather", records=True
        ),
        "one parameter takes one collective; two of them two, on one rank too",
    ),
)
