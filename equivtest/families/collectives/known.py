"""Predicates on cases of collectives, for the conditions `where` in known_failures.toml."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equivtest.families.collectives.case import CollectivesCase


STRIDES_LOST = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "scatter", "int64_all_reduce", "int64_reduce")
"""Functions for which gloo ignores strides and takes the first elements in memory (torch 2.13.0)."""


def loses_strides(case: CollectivesCase) -> bool:
    """True if the case passes a tensor with gaps between its elements to a function in `STRIDES_LOST`."""
    return _hands_strides_to(case, *STRIDES_LOST)


def scatters_strides(case: CollectivesCase) -> bool:
    """True if the case calls scatter on a tensor with gaps between its elements."""
    return _hands_strides_to(case, "scatter")


def coalesces_one_row(case: CollectivesCase) -> bool:
    """True if the case calls all_reduce_coalesced on one contiguous tensor whose dims of size 1 have unusual strides.

    In the orders other than 'rows', this is a tensor with a prime number of elements: all dims but one have size 1.
    """
    numel = case.numels[0]
    is_one_row = case.order != "rows" and numel > 1 and all(numel % factor for factor in range(2, numel))
    return is_one_row and len(case.numels) == 1 and "coalesced_all_reduce_sum" in case.collectives


def _hands_strides_to(case: CollectivesCase, *functions: str) -> bool:
    is_apart = case.stride > 1 and max(case.numels) > 1
    return is_apart and any(call.function in functions for call in case.calls)
