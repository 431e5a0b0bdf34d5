"""Defects of embeddings by rows and by columns that should be the same."""

from __future__ import annotations

from equivtest.families.embedding.ways.case import EmbeddingWaysCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.embedding.ways.defects:"
_REAL = (("real", 12),)  # numbers whose sums in other orders, and rounded once, are others, three of them and four

DEFECTS = (
    Defect(
        _HERE + "gradient_added_backwards",
        "embedding_both_ways",
        "a sum in another order",
        "both_ways_agree",
        "ways",
        EmbeddingWaysCase(world_size=1, leading=(3,), values=_REAL),
        "two numbers have one sum in any order; three tokens hold the only id",
    ),
    Defect(
        _HERE + "gradient_added_in_float64",
        "embedding_both_ways",
        "a sum in other bits",
        "both_ways_agree",
        "ways",
        EmbeddingWaysCase(world_size=1, leading=(4,), values=_REAL),
        "the sum of two is rounded once in either; of three to five tokens of one id some values show it",
    ),
    Defect(
        _HERE + "first_id_of_a_part_missing",
        "embedding_both_ways",
        "ids at the edge of a shard",
        "both_ways_agree",
        "ways",
        EmbeddingWaysCase(world_size=2, leading=(2,), num_embeddings=2, requires_grad=()),
        "one rank has no second part; of two ids in two tokens one begins it",
    ),
    Defect(
        _HERE + "padding_learns_by_columns",
        "embedding_both_ways",
        "flags",
        "both_ways_agree",
        "ways",
        EmbeddingWaysCase(world_size=1, padding_idx=0),
        "one rank and one token, which holds the padding id, suffice",
    ),
    Defect(
        _HERE + "columns_answered_for_rows",
        "embedding_both_ways",
        "other collectives than documented",
        "uses_only_collectives",
        "collectives",
        EmbeddingWaysCase(world_size=2, num_embeddings=2, embedding_dim=2, requires_grad=(), records=True),
        "one rank redistributes nothing; of fewer than two ids or features torch gathers the weight",
    ),
)
