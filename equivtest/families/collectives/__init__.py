"""The collectives of torch.distributed, each called alone."""

SUBJECTS = {
    "collectives": "equivtest.families.collectives.subject:collectives",
}
