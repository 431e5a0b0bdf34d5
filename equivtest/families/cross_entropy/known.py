"""Predicates on cases of cross entropy, for the conditions `where` in known_failures.toml."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivtest.layout import shard_bounds

if TYPE_CHECKING:
    from equivtest.families.cross_entropy.case import CrossEntropyCase, RefusedCrossEntropyCase


def has_empty_part(case: CrossEntropyCase) -> bool:
    """True if the last rank along the axis of classes has no class."""
    start, stop = shard_bounds(case.num_classes, case.class_ranks, case.class_ranks - 1)
    return start == stop


def is_image(case: CrossEntropyCase) -> bool:
    """True if the logits are (N, C, H, W) with both H and W above 1."""
    return len(case.positions) == 3 and min(case.positions[1:]) > 1


def is_strided_volume(case: CrossEntropyCase) -> bool:
    """True if the logits are (N, C, D, H, W) whose last two dims, both above 1, are swapped in memory."""
    return len(case.positions) == 4 and min(case.positions[2:]) > 1 and not case.x_contiguous


def has_target_beyond_classes(case: CrossEntropyCase) -> bool:
    """True if some position is ignored and its target, `ignore_index`, is not the number of a class."""
    holds_it = case.ignored == "all" or (case.ignored == "some" and case.num_positions > 1)
    return holds_it and not 0 <= case.ignore_index < case.num_classes


def weight_fits_some_rank(case: RefusedCrossEntropyCase) -> bool:
    """True if some rank's shard of the weight has the right size although the weight has one class too many."""
    ends = [
        [shard_bounds(size, case.world_size, rank) for rank in range(case.world_size)]
        for size in (case.num_classes, case.num_classes + 1)
    ]
    return any(b - a == d - c for (a, b), (c, d) in zip(*ends, strict=True))
