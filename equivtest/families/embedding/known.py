"""Predicates on cases of this family that known failures name in `where`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivtest.layout import shard_bounds

if TYPE_CHECKING:
    from equivtest.families.embedding.case import EmbeddingCase


def has_empty_part(case: EmbeddingCase) -> bool:
    """True if the last rank has no part of the sharded dim."""
    start, stop = shard_bounds(case.sharded_size, case.world_size, case.world_size - 1)
    return start == stop


def output_is_uneven(case: EmbeddingCase) -> bool:
    """True if ranks hold different numbers of output elements."""
    return case.worst_shard_kind(("output",)) != "even"
