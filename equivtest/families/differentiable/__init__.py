"""Family of cases that call collectives of torch through which autograd passes gradients."""

SUBJECTS = {
    "differentiable_collectives": "equivtest.families.differentiable.subject:differentiable_collectives",
}
