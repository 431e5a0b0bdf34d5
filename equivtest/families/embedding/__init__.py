"""Embeddings whose table is divided by ColwiseParallel or RowwiseParallel."""

SUBJECTS = {
    "colwise_embedding": "equivtest.families.embedding.subject:colwise_embedding",
    "rowwise_embedding": "equivtest.families.embedding.subject:rowwise_embedding",
}
