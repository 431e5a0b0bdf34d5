"""Defects of dropouts."""

from __future__ import annotations

from equivtest.families.dropout.case import DropoutCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.dropout.defects:"
_REPLACES = "parallel_dropout"

DEFECTS = (
    Defect(
        _HERE + "another_mask_in_backward",
        _REPLACES,
        "state across calls",
        "gradients_equal_unsharded",
        "value",
        DropoutCase(world_size=1, values=(("dense", 1),)),
        "of one element the two masks differ half of the time",
    ),
    Defect(
        _HERE + "not_scaled",
        _REPLACES,
        "wrong divisor or wrong group",
        "equals_unsharded",
        "value",
        DropoutCase(world_size=1, requires_grad=(), values=(("dense", 6),)),
        "one element that is left",
    ),
    Defect(
        _HERE + "same_mask_in_each_shard",
        _REPLACES,
        "chance that is none",
        "drops_at_random",
        "chance",
        DropoutCase(world_size=2, shape=(2, 56), layout="shard(0)", requires_grad=()),
        "two ranks need the 56 elements each of which the claim speaks",
    ),
    Defect(
        _HERE + "replicas_that_draw_apart",
        _REPLACES,
        "replicas that differ",
        "agrees_on_all_ranks",
        "replica",
        DropoutCase(world_size=2, requires_grad=(), values=(("dense", 2),)),
        "of one element two ranks differ half of the time",
    ),
    Defect(
        _HERE + "nothing_dropped",
        _REPLACES,
        "chance that is none",
        "drops_at_random",
        "chance",
        DropoutCase(world_size=1, shape=(56,), requires_grad=()),
        "the 56 elements of which the claim speaks",
    ),
    Defect(
        _HERE + "drops_in_eval",
        _REPLACES,
        "flags",
        "equals_unsharded",
        "value",
        DropoutCase(world_size=1, training=False, requires_grad=()),
        "one element is doubled or dropped",
    ),
)
