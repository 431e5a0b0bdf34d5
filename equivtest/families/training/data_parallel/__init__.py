"""The perceptron under DDP, FSDP2 and ZeRO-3."""

SUBJECTS = {
    "ddp_mlp": "equivtest.families.training.data_parallel.subject:ddp_mlp",
    "fsdp2_mlp": "equivtest.families.training.data_parallel.subject:fsdp2_mlp",
}
