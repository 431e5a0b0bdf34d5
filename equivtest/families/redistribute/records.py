"""Defects of redistribution."""

from __future__ import annotations

from equivtest.families.redistribute.case import RedistributeCase
from equivtest.families.redistribute.case_refused import RefusedRedistributeCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.redistribute.defects:"

DEFECTS = (
    Defect(
        _HERE + "padding_kept",
        "redistribute",
        "size not a multiple of the world size",
        "equals_unsharded",
        "shape",
        RedistributeCase(world_size=2, target=("shard(0)",), requires_grad=()),
        "one rank pads nothing; of two, the second's shard of one element is empty",
    ),
    Defect(
        _HERE + "shards_swapped",
        "redistribute",
        "shard order",
        "equals_unsharded",
        "value",
        RedistributeCase(world_size=2, shape=(2,), target=("shard(0)",), requires_grad=()),
        "two ranks need one element each",
    ),
    Defect(
        _HERE + "mesh_axes_swapped",
        "redistribute",
        "shard order",
        "equals_unsharded",
        "value",
        RedistributeCase(
            world_size=4,
            mesh=(2, 2),
            shape=(2,),
            source=("replicate", "replicate"),
            target=("shard(0)", "replicate"),
            requires_grad=(),
        ),
        "one rank has no other coordinates; the two places of the axis that divides need one element each",
    ),
    Defect(
        _HERE + "shorter_shard_not_copied",
        "redistribute",
        "uninitialised memory reaches a value",
        "equals_unsharded",
        "value",
        RedistributeCase(world_size=2, shape=(3,), source=("shard(0)",), requires_grad=()),
        "of one element the second of two ranks has an empty shard, which brings nothing; of two, both have one",
    ),
    Defect(
        _HERE + "gathered_by_adding_zeros",
        "redistribute",
        "special values replaced",
        "is_exact_without_reduction",
        "bits",
        RedistributeCase(world_size=2, source=("shard(0)",), values=(("special", 0),), requires_grad=()),
        "one rank adds nothing; of two, the second adds +0.0 to the first one's -0.0, which is special value number 0",
    ),
    Defect(
        _HERE + "averaged_instead_of_summed",
        "redistribute",
        "wrong divisor or wrong group",
        "equals_unsharded",
        "value",
        RedistributeCase(world_size=2, source=("partial(sum)",), requires_grad=()),
        "the average of one rank is its sum",
    ),
    Defect(
        _HERE + "reduced_in_place",
        "redistribute",
        "inputs modified",
        "does_not_touch_its_inputs",
        "touched",
        RedistributeCase(world_size=2, source=("partial(sum)",), requires_grad=()),
        "one rank's operand is the sum; no odd integer leaves another one as it was",
    ),
    Defect(
        _HERE + "made_whole_then_divided",
        "redistribute",
        "other collectives than documented",
        "uses_only_collectives",
        "collectives",
        RedistributeCase(world_size=2, source=("partial(sum)",), target=("shard(0)",), requires_grad=(), records=True),
        "one rank reduces nothing",
    ),
    Defect(
        _HERE + "gradient_of_operands_added",
        "redistribute",
        "wrong divisor or wrong group",
        "gradients_equal_unsharded",
        "value",
        RedistributeCase(world_size=2, source=("partial(sum)",)),
        "one rank has one operand; no cotangent is zero",
    ),
    Defect(
        _HERE + "gradient_left_partial",
        "redistribute",
        "layout of gradients",
        "keeps_layout_of_parameter",
        "layout",
        RedistributeCase(world_size=1, source=("partial(sum)",)),
        "the layout is wrong on a mesh of one rank too",
    ),
    Defect(
        _HERE + "partial_target_accepted",
        "redistribute",
        "misfits accepted",
        "refuses",
        "not_refused",
        RefusedRedistributeCase(world_size=1),
        "one rank and one element are accepted too",
    ),
)
"""Registered in `equivtest.kit.defect`."""
