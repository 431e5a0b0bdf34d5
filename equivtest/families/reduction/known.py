"""Predicates on cases of this family that known failures name in `where`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivtest.layout import Shard

if TYPE_CHECKING:
    from equivtest.families.reduction.case import ReductionCase


def shared_size(case: ReductionCase) -> int:
    """Returns the size of the dim that the ranks share; 0 if they share none."""
    return case.shape[case.placement.dim] if isinstance(case.placement, Shard) else 0


def has_empty_shard(case: ReductionCase) -> bool:
    """True if some rank has no element of x."""
    return case.worst_shard_kind(("x",)) == "empty"
