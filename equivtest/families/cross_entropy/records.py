"""Defects of cross entropies over divided classes."""

from __future__ import annotations

from equivtest.families.cross_entropy.case import CrossEntropyCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.cross_entropy.defects:"
_REPLACES = "parallel_cross_entropy"

DEFECTS = (
    Defect(
        _HERE + "largest_of_own_classes",
        _REPLACES,
        "a partial value taken for the whole",
        "equals_unsharded",
        "value",
        CrossEntropyCase(world_size=2, num_classes=2, requires_grad=()),
        "two ranks need one class each, whose logits differ",
    ),
    Defect(
        _HERE + "sum_of_own_classes",
        _REPLACES,
        "a partial value taken for the whole",
        "equals_unsharded",
        "value",
        CrossEntropyCase(world_size=2, num_classes=2, requires_grad=()),
        "two ranks need one class each",
    ),
    Defect(
        _HERE + "sum_in_bfloat16",
        _REPLACES,
        "a reduction in fewer bits",
        "equals_unsharded",
        "value",
        CrossEntropyCase(world_size=1, num_classes=2, requires_grad=()),
        "the exponentials of two logits have more bits than bfloat16, on one rank too; of one logit it is 1",
    ),
    Defect(
        _HERE + "target_of_next_rank",
        _REPLACES,
        "ids at the edge of a shard",
        "equals_unsharded",
        "value",
        CrossEntropyCase(world_size=1, num_classes=2, requires_grad=()),
        "one rank then has no target, and a loss of zero, which is right of one class alone",
    ),
    Defect(
        _HERE + "first_class_for_targets_elsewhere",
        _REPLACES,
        "ids at the edge of a shard",
        "gradients_equal_unsharded",
        "value",
        CrossEntropyCase(world_size=2, num_classes=2),
        "two ranks need one class each, of which one has the target",
    ),
    Defect(
        _HERE + "weight_of_local_class",
        _REPLACES,
        "shard order",
        "equals_unsharded",
        "value",
        CrossEntropyCase(world_size=2, positions=(2,), num_classes=2, weighted=True, requires_grad=()),
        "two ranks need one class each, and a target on the second",
    ),
    Defect(
        _HERE + "ignored_counted_in_mean",
        _REPLACES,
        "wrong divisor or wrong group",
        "equals_unsharded",
        "value",
        CrossEntropyCase(world_size=1, reduction="mean", ignored="all", requires_grad=()),
        "a mean of nothing is NaN, and zero where what is ignored counts",
    ),
    Defect(
        _HERE + "mean_of_unweighted",
        _REPLACES,
        "wrong divisor or wrong group",
        "equals_unsharded",
        "value",
        CrossEntropyCase(world_size=1, num_classes=2, reduction="mean", weighted=True, requires_grad=()),
        "one position is off by its weight; the loss of a single class is zero",
    ),
    Defect(
        _HERE + "ignored_learn",
        _REPLACES,
        "flags",
        "gradients_equal_unsharded",
        "value",
        CrossEntropyCase(world_size=1, num_classes=2, ignored="all"),
        "one position that does not count; the gradient of a single class is zero",
    ),
)
