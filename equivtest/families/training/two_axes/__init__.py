"""Subjects that train the perceptron on a mesh of two axes: HSDP, and FSDP2 or DDP with tensor parallelism."""

SUBJECTS = {
    "ddp_tp_mlp": "equivtest.families.training.two_axes.subject:ddp_tp_mlp",
    "fsdp2_tp_mlp": "equivtest.families.training.two_axes.subject:fsdp2_tp_mlp",
    "hsdp_mlp": "equivtest.families.training.two_axes.subject:hsdp_mlp",
}
