"""The collectives of torch that have a backward."""

SUBJECTS = {
    "differentiable_collectives": "equivtest.families.differentiable.subject:differentiable_collectives",
}
