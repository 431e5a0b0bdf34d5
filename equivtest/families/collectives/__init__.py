"""The collectives of torch.distributed, each called by itself."""

SUBJECTS = {
    "collectives": "equivtest.families.collectives.subject:collectives",
}
