"""What known failures ask of cases of this family, by name, in `where`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivtest.layout import shard_bounds

if TYPE_CHECKING:
    from equivtest.families.embedding.case import EmbeddingCase


def has_empty_part(case: EmbeddingCase) -> bool:
    """Whether the last rank has no part of that dim."""
    start, stop = shard_bounds(case.sharded_size, case.world_size, case.world_size - 1)
    return start == stop


def output_is_uneven(case: EmbeddingCase) -> bool:
    """Whether ranks hold different amounts of the output."""
    return case.worst_shard_kind(("output",)) != "even"
