"""Claims about torch's tensor-parallel styles on nn.Embedding.

A failure here means that a parallelized embedding looks up, or trains, other rows. Look first at the mask of a rowwise
embedding, then at the tensors that the style redistributes.
"""

from __future__ import annotations

from functools import partial

from equivtest.families.embedding.case import EmbeddingCase
from equivtest.families.embedding.strategy import embedding_cases, refused_embedding_cases
from equivtest.property import Property
from equivtest.verdicts.claims import (
    is_exact_but_for_added_zeros,
    is_exact_without_reduction,
    refuses,
    repeats_itself,
    uses_only_collectives,
)
from equivtest.verdicts.judging import DEFAULT_CLAIMS

COLWISE = "torch/distributed/tensor/parallel/style.py, class ColwiseParallel (2.13.0)"
ROWWISE = (
    "torch/distributed/tensor/parallel/style.py, class RowwiseParallel, and _MaskPartial in "
    "torch/distributed/tensor/placement_types.py (2.13.0)"
)
CLAIMS = (*DEFAULT_CLAIMS, repeats_itself, uses_only_collectives)
ALL_MODES = (("dense", 0), ("index", 1), ("special", 2), ("real", 3))

colwise_embedding = Property(
    subject="colwise_embedding",
    statement="ColwiseParallel(nn.Embedding) computes what the unsharded nn.Embedding computes.",
    source=COLWISE,
    cases=partial(embedding_cases, style="colwise"),
    claims=(*CLAIMS, is_exact_without_reduction),
    examples=(
        # Llama's use under sequence parallelism: ids whole, the output sharded along the sequence.
        EmbeddingCase(world_size=2, style="colwise", leading=(2, 6), num_embeddings=8, embedding_dim=4,
                      output_layout="shard(1)", values=ALL_MODES, records=True),
    ),
    weight=4,
)  # fmt: skip

rowwise_embedding = Property(
    subject="rowwise_embedding",
    statement="RowwiseParallel(nn.Embedding) computes what the unsharded nn.Embedding computes.",
    source=ROWWISE,
    cases=partial(embedding_cases, style="rowwise"),
    claims=(*CLAIMS, is_exact_but_for_added_zeros),
    examples=(
        EmbeddingCase(world_size=2, style="rowwise", leading=(2, 6), num_embeddings=8, embedding_dim=4,
                      output_layout="shard(1)", values=ALL_MODES, records=True),
        # A vocabulary of 5 over four ranks: shards of 2, 2, 1 and 0 ids, with the padding id at an edge.
        EmbeddingCase(world_size=4, style="rowwise", leading=(8,), num_embeddings=5, embedding_dim=3,
                      padding_idx=2, values=ALL_MODES, records=True),
    ),
    weight=4,
)  # fmt: skip

colwise_embedding_refuses = Property(
    subject="colwise_embedding",
    statement="Every rank of ColwiseParallel(nn.Embedding) refuses ids that nn.Embedding refuses.",
    source=f"{COLWISE}; torch.nn.Embedding",
    cases=partial(refused_embedding_cases, style="colwise"),
    claims=(refuses,),
)

rowwise_embedding_refuses = Property(
    subject="rowwise_embedding",
    statement="Every rank of RowwiseParallel(nn.Embedding) refuses ids that nn.Embedding refuses.",
    source=f"{ROWWISE}; torch.nn.Embedding",
    cases=partial(refused_embedding_cases, style="rowwise"),
    claims=(refuses,),
)
