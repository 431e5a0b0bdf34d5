"""Family of cases that run dropout on sharded activations."""

SUBJECTS = {
    "parallel_dropout": "equivtest.families.dropout.subject:parallel_dropout",
}
