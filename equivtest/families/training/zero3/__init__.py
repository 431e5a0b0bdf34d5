"""Subjects that train the perceptron under the project's own ZeRO-3."""

SUBJECTS = {
    "zero3_mlp_all_gather": "equivtest.families.training.zero3.subject:zero3_mlp_all_gather",
    "zero3_mlp_all_reduce": "equivtest.families.training.zero3.subject:zero3_mlp_all_reduce",
}
