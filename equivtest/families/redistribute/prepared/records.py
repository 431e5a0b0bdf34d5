"""Defects of modules whose inputs and outputs are prepared."""

from __future__ import annotations

from equivtest.families.redistribute.prepared.case import PreparedCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.redistribute.prepared.defects:"

DEFECTS = (
    Defect(
        _HERE + "input_left_as_it_came",
        "prepared_module",
        "a step left out",
        "equals_unsharded",
        "layout",
        PreparedCase(world_size=1, target=("shard(0)",), requires_grad=()),
        "a layout differs by its name on one rank too",
    ),
    Defect(
        _HERE + "named_input_left_out",
        "prepared_module",
        "a step left out",
        "equals_unsharded",
        "layout",
        PreparedCase(world_size=1, target=("shard(0)",), x_is_dtensor=True, as_kwarg=True, requires_grad=()),
        "a layout differs by its name on one rank too",
    ),
    Defect(
        _HERE + "own_part_for_the_whole",
        "prepared_module",
        "a partial value taken for the whole",
        "equals_unsharded",
        "value",
        PreparedCase(
            world_size=2, shape=(2,), source=("shard(0)",), style="output", use_local_output=True, requires_grad=()
        ),
        "two ranks need one element each",
    ),
)
