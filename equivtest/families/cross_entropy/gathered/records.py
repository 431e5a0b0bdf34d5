"""Defects of cross entropies of gathered logits."""

from __future__ import annotations

from equivtest.families.cross_entropy.gathered.case import GatheredCrossEntropyCase, RefusedGatheredCrossEntropyCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.cross_entropy.gathered.defects:"
_REPLACES = "dtensor_cross_entropy"

DEFECTS = (
    Defect(
        _HERE + "smoothing_over_own_classes",
        _REPLACES,
        "wrong divisor or wrong group",
        "equals_unsharded",
        "value",
        GatheredCrossEntropyCase(world_size=2, num_classes=2, label_smoothing=0.125, requires_grad=()),
        "two ranks need one class each; of one class all losses are zero",
    ),
    Defect(
        _HERE + "ignored_are_smoothed",
        _REPLACES,
        "flags",
        "equals_unsharded",
        "value",
        GatheredCrossEntropyCase(world_size=1, num_classes=2, label_smoothing=0.125, ignored="all", requires_grad=()),
        "one position that does not count, and two classes, since the loss of a single one is zero",
    ),
    Defect(
        _HERE + "logits_gathered_twice",
        _REPLACES,
        "other collectives than documented",
        "uses_only_collectives",
        "collectives",
        GatheredCrossEntropyCase(world_size=2, records=True, requires_grad=()),
        "two ranks share one class; one rank gathers nothing",
    ),
    Defect(
        _HERE + "gradient_of_every_rank",
        _REPLACES,
        "a term added on every rank",
        "gradients_equal_unsharded",
        "value",
        GatheredCrossEntropyCase(world_size=2, num_classes=2),
        "two ranks; the gradient of a single class is zero",
    ),
    Defect(
        _HERE + "plain_targets_taken",
        _REPLACES,
        "misfits accepted",
        "refuses",
        "not_refused",
        RefusedGatheredCrossEntropyCase(world_size=1, misfit="plain_target", positions=(2,), target_is_dtensor=False),
        "two positions, since a target of one is taken for a number; one rank is asked to refuse too",
    ),
)
