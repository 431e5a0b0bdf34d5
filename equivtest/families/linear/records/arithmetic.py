"""Defects of linear layers that are wrong in their arithmetic."""

from __future__ import annotations

from equivtest.families.linear.case import LinearCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.linear.defects.arithmetic:"

DEFECTS = (
    Defect(
        _HERE + "partial_outputs_reduced_in_bfloat16",
        "rowwise_linear",
        "a reduction in fewer bits",
        "equals_unsharded",
        "value",
        LinearCase(world_size=2, style="rowwise"),
        "one rank reduces nothing; one product of odd integers takes 24 bits, bfloat16 has 8",
    ),
    Defect(
        _HERE + "input_gradient_averaged",
        "colwise_linear",
        "wrong divisor or wrong group",
        "gradients_equal_unsharded",
        "value",
        LinearCase(world_size=2, style="colwise", requires_grad=("x",)),
        "the average of one rank is its sum; of two it is half",
    ),
    Defect(
        _HERE + "one_product_dropped",
        "colwise_linear",
        "a term missing",
        "equals_unsharded",
        "value",
        LinearCase(world_size=1, style="colwise", in_features=2, requires_grad=()),
        "a product is only dropped where another is left; no product of dense values is zero",
    ),
    Defect(
        _HERE + "weight_truncated_to_tf32",
        "colwise_linear",
        "operands in fewer bits",
        "equals_unsharded",
        "value",
        LinearCase(world_size=1, style="colwise", requires_grad=()),
        "the only weight of a dense draw is an odd integer of 12 bits, and TF32 has 11",
    ),
    Defect(
        _HERE + "weight_gradient_one_ulp_off",
        "rowwise_linear",
        "one element off by one ulp",
        "gradients_equal_unsharded",
        "value",
        LinearCase(world_size=1, style="rowwise", requires_grad=("weight",)),
        "one element on one rank is off",
    ),
)
