"""Family of cases that call the collectives of torch.distributed directly."""

SUBJECTS = {
    "collectives": "equivtest.families.collectives.subject:collectives",
}
