"""Family of cases that run nn.Linear under ColwiseParallel or RowwiseParallel."""

SUBJECTS = {
    "colwise_linear": "equivtest.families.linear.subject:colwise_linear",
    "rowwise_linear": "equivtest.families.linear.subject:rowwise_linear",
}
