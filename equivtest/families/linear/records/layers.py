"""Defects of linear layers that are wrong beyond arithmetic."""

from __future__ import annotations

from equivtest.families.linear.case import LinearCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.linear.defects.layers:"

DEFECTS = (
    Defect(
        _HERE + "bias_on_every_rank",
        "rowwise_linear",
        "a partial value taken for the whole",
        "equals_unsharded",
        "value",
        LinearCase(world_size=2, style="rowwise", bias=True),
        "one rank adds it once; two add it twice",
    ),
    Defect(
        _HERE + "input_gradient_not_reduced",
        "colwise_linear",
        "a reduction missing in the backward",
        "gradients_equal_unsharded",
        "value",
        LinearCase(world_size=2, style="colwise", requires_grad=("x",)),
        "the second rank holds no out feature, so its share of the gradient is zero",
    ),
    Defect(
        _HERE + "weight_gradient_shards_swapped",
        "colwise_linear",
        "shard order",
        "gradients_equal_unsharded",
        "value",
        LinearCase(world_size=2, style="colwise", out_features=2, requires_grad=("weight",)),
        "two ranks need one out feature each",
    ),
    Defect(
        _HERE + "weight_gradient_replicated",
        "rowwise_linear",
        "layout of gradients",
        "keeps_layout_of_parameter",
        "layout",
        LinearCase(world_size=1, style="rowwise", requires_grad=("weight",)),
        "the layout is wrong on a mesh of one rank too",
    ),
    Defect(
        _HERE + "cotangent_scaled_in_place",
        "rowwise_linear",
        "inputs modified",
        "does_not_touch_its_inputs",
        "touched",
        LinearCase(world_size=1, style="rowwise", requires_grad=()),
        "one rank and one element suffice",
    ),
    Defect(
        _HERE + "rounds_on_one_rank",
        "rowwise_linear",
        "a way of its own for one rank",
        "is_the_identity_for_one_rank",
        "bits",
        LinearCase(world_size=1, style="rowwise", requires_grad=()),
        "one product of two factors that share the 24 bits of float32 has more than the 8 of bfloat16",
    ),
    Defect(
        _HERE + "output_differs_on_last_rank",
        "rowwise_linear",
        "replicas that differ",
        "agrees_on_all_ranks",
        "replica",
        LinearCase(world_size=2, style="rowwise"),
        "two ranks are needed to differ",
    ),
)
