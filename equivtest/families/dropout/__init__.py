"""Dropout of divided activations."""

SUBJECTS = {
    "parallel_dropout": "equivtest.families.dropout.subject:parallel_dropout",
}
