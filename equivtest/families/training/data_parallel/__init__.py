"""Subjects that train the perceptron under DDP and FSDP2."""

SUBJECTS = {
    "ddp_mlp": "equivtest.families.training.data_parallel.subject:ddp_mlp",
    "fsdp2_mlp": "equivtest.families.training.data_parallel.subject:fsdp2_mlp",
}
