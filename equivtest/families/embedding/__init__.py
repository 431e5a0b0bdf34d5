"""Family of cases that run nn.Embedding under ColwiseParallel or RowwiseParallel."""

SUBJECTS = {
    "colwise_embedding": "equivtest.families.embedding.subject:colwise_embedding",
    "rowwise_embedding": "equivtest.families.embedding.subject:rowwise_embedding",
}
