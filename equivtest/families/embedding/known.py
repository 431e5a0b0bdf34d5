"""Predicates on cases of embeddings, for the conditions `where` in known_failures.toml."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivtest.layout import shard_bounds

if TYPE_CHECKING:
    from equivtest.families.embedding.case import EmbeddingCase


def has_empty_part(case: EmbeddingCase) -> bool:
    """True if the last rank's shard of the weight is empty."""
    start, stop = shard_bounds(case.sharded_size, case.world_size, case.world_size - 1)
    return start == stop


def output_is_uneven(case: EmbeddingCase) -> bool:
    return case.worst_shard_kind(("output",)) != "even"
