"""Subject that trains the perceptron under sequence parallelism."""

SUBJECTS = {
    "sequence_parallel_mlp": "equivtest.families.training.sequence.subject:sequence_parallel_mlp",
}
