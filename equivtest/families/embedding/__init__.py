"""Embeddings whose table is divided by ColwiseParallel or RowwiseParallel."""

SUBJECTS = {
    "colwise_embedding": "equivtest.families.embedding.subject:colwise_embedding",
    "embedding_both_ways": "equivtest.families.embedding.subject:embedding_both_ways",
    "rowwise_embedding": "equivtest.families.embedding.subject:rowwise_embedding",
}
