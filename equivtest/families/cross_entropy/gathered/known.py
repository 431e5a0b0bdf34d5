"""Predicates on cases without loss_parallel, for the conditions `where` in known_failures.toml."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equivtest.families.cross_entropy.gathered.case import GatheredCrossEntropyCase


def may_count_unequally(case: GatheredCrossEntropyCase) -> bool:
    """True if, in a mean, a position on one rank may have a larger weight than a position on another rank."""
    return case.weighted or case.ignored != "none" or 0 <= case.ignore_index < case.num_classes
