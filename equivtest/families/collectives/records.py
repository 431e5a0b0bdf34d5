"""Defects of single collectives."""

from __future__ import annotations

from equivtest.families.collectives.case import CollectivesCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.collectives.defects:"

DEFECTS = (
    Defect(
        _HERE + "first_two_swapped",
        "collectives",
        "shard order",
        "equals_unsharded",
        "value",
        CollectivesCase(world_size=2, collectives=("all_gather",)),
        "one rank has nobody to change places with",
    ),
    Defect(
        _HERE + "last_operand_left_out",
        "collectives",
        "a term missing",
        "equals_unsharded",
        "value",
        CollectivesCase(world_size=2),
        "one rank's operand is never left out",
    ),
    Defect(
        _HERE + "parts_to_the_next_rank",
        "collectives",
        "shard order",
        "equals_unsharded",
        "value",
        CollectivesCase(world_size=2, collectives=("reduce_scatter_tensor_sum",)),
        "one rank is its own next",
    ),
    Defect(
        _HERE + "root_from_one",
        "collectives",
        "another root",
        "equals_unsharded",
        "value",
        CollectivesCase(world_size=2, collectives=("broadcast",)),
        "one rank is the only root",
    ),
    Defect(
        _HERE + "maximum_added",
        "collectives",
        "another reduction",
        "equals_unsharded",
        "value",
        CollectivesCase(world_size=2, collectives=("reduce_max",)),
        "one operand is its sum and its largest",
    ),
    Defect(
        _HERE + "tail_of_large_sizes_lost",
        "collectives",
        "a limit of size",
        "equals_unsharded",
        "value",
        CollectivesCase(world_size=1, collectives=("all_to_all_single",), numels=(1000,)),
        "one rank sends itself what it has; 1000 is the smallest size of the tables that is concerned",
    ),
    Defect(
        _HERE + "taken_before_it_is_there",
        "collectives",
        "a collective not waited for",
        "equals_unsharded",
        "value",
        CollectivesCase(world_size=2, waits="async"),
        "one rank's operand is the result; a synchronous call is not waited for",
    ),
    Defect(
        _HERE + "operand_left_reduced",
        "collectives",
        "inputs modified",
        "does_not_touch_its_inputs",
        "touched",
        CollectivesCase(world_size=2, collectives=("reduce_scatter_tensor_sum",)),
        "one rank's operand is its own sum",
    ),
    Defect(
        _HERE + "gathered_by_a_sum",
        "collectives",
        "special values replaced",
        "is_exact_without_reduction",
        "bits",
        CollectivesCase(world_size=2, collectives=("all_gather_into_tensor",), values=(("special", 0),)),
        "one rank adds nothing, and the zero that dense values lack must be negative",
    ),
    Defect(
        _HERE + "group_of_the_world",
        "collectives",
        "wrong divisor or wrong group",
        "equals_unsharded",
        "value",
        CollectivesCase(world_size=1, members=(1,)),
        "two meshes of one rank each add up what is the other's, where values differ between them",
    ),
    Defect(
        _HERE + "first_rank_put_last",
        "collectives",
        "shard order",
        "equals_unsharded",
        "value",
        CollectivesCase(world_size=2, collectives=("functional_all_to_all_single_uneven",), numels=(2,)),
        "one rank gets from itself alone; of one element no rank of two gets something from both",
    ),
)
