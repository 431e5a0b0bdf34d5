"""Subject that trains the perceptron under FSDP2 with mixed precision."""

SUBJECTS = {
    "fsdp2_mixed_mlp": "equivtest.families.training.mixed.subject:fsdp2_mixed_mlp",
}
