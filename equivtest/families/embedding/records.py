"""Defects of embeddings."""

from __future__ import annotations

from equivtest.families.embedding.case import EmbeddingCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.embedding.defects:"

DEFECTS = (
    Defect(
        _HERE + "mask_off_by_one",
        "rowwise_embedding",
        "ids at the edge of a shard",
        "equals_unsharded",
        "value",
        EmbeddingCase(world_size=2, style="rowwise", leading=(2,), num_embeddings=2, requires_grad=()),
        "one rank has no second part; of two ids in two tokens one begins it",
    ),
    Defect(
        _HERE + "mask_not_applied",
        "rowwise_embedding",
        "a partial value taken for the whole",
        "equals_unsharded",
        "value",
        EmbeddingCase(world_size=2, style="rowwise", num_embeddings=2, requires_grad=()),
        "one rank masks nothing, and a rank without ids of its own has no row to add",
    ),
    Defect(
        _HERE + "part_of_another_rank",
        "rowwise_embedding",
        "shard order",
        "equals_unsharded",
        "value",
        EmbeddingCase(world_size=2, style="rowwise", num_embeddings=2, requires_grad=()),
        "two ranks need one id each",
    ),
    Defect(
        _HERE + "lookups_averaged",
        "rowwise_embedding",
        "wrong divisor or wrong group",
        "equals_unsharded",
        "value",
        EmbeddingCase(world_size=2, style="rowwise", requires_grad=()),
        "one rank's lookup is its average; the zero of a rank without ids halves the other's",
    ),
    Defect(
        _HERE + "padding_row_learns",
        "colwise_embedding",
        "flags",
        "gradients_equal_unsharded",
        "value",
        EmbeddingCase(world_size=1, style="colwise", padding_idx=0),
        "one rank and one token, which holds the padding id, suffice",
    ),
    Defect(
        _HERE + "repeats_counted_once",
        "colwise_embedding",
        "a term missing",
        "gradients_equal_unsharded",
        "value",
        EmbeddingCase(world_size=1, style="colwise", leading=(2,)),
        "two tokens hold the only id",
    ),
    Defect(
        _HERE + "features_of_next_rank",
        "colwise_embedding",
        "shard order",
        "equals_unsharded",
        "value",
        EmbeddingCase(world_size=2, style="colwise", embedding_dim=2, requires_grad=()),
        "two ranks need one feature each",
    ),
    Defect(
        _HERE + "ids_gathered_in_another_order",
        "colwise_embedding",
        "shard order",
        "equals_unsharded",
        "value",
        EmbeddingCase(
            world_size=2, style="colwise", leading=(2,), num_embeddings=2, input_layout="shard(0)", requires_grad=()
        ),
        "two ranks need one token each; two tokens hold both of two ids",
    ),
)
