"""Predicates on cases of two axes, for the conditions `where` in known_failures.toml."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivtest.layout import shard_bounds

if TYPE_CHECKING:
    from equivtest.families.training.two_axes.case import TwoAxisCase


def has_rank_without_hidden(case: TwoAxisCase) -> bool:
    """True if the last rank of a mesh row has no hidden feature."""
    start, stop = shard_bounds(case.hidden_features, case.num_hidden_parts, case.num_hidden_parts - 1)
    return start == stop


def has_frozen_parameter(case: TwoAxisCase) -> bool:
    return case.trained_names() != case.parameter_names()
