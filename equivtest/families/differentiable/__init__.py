"""Family of cases that call torch's collectives that have a backward."""

SUBJECTS = {
    "differentiable_collectives": "equivtest.families.differentiable.subject:differentiable_collectives",
}
