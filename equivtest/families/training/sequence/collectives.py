"""Derives the collectives of a perceptron under sequence parallelism from its layouts."""

from __future__ import annotations

from equivtest.cases.case import at_step
from equivtest.families.training.sequence.case import MlpCase
from equivtest.layout import Partial, Replicate
from equivtest.oracle.collectives import Collectives, distribute_parameters, expected_collectives, redistribute


@expected_collectives.register
def mlp_collectives(case: MlpCase, rank: int) -> Collectives:
    """Returns the collectives of all steps.

    Parameters are distributed first. Then each step has two collectives in the forward and two in the backward. In the
    forward, x is gathered along the sequence for in_proj, and the partial output of out_proj is reduced and scattered
    along the sequence. In the backward, the cotangent is gathered, because a partial sum's gradient is replicated, and
    the gradient of x, which is a partial sum, is reduced and scattered. No other tensor, and no update, takes a
    collective.

    Source: ColwiseParallel and RowwiseParallel in torch/distributed/tensor/parallel/style.py (2.13.0); the backward by
    the chain rule.
    """
    shapes, layouts = case.shapes(), case.layouts()
    calls = distribute_parameters(case, rank, case.parameter_names())
    for step in range(1, case.steps + 1):
        x, output = at_step(step, "x"), at_step(step, "output")
        along, scattered = layouts[x].placements[0], layouts[output].placements[0]
        calls += redistribute(case, shapes[x], along, Replicate(), "forward")
        calls += redistribute(case, shapes[output], Partial(), scattered, "forward")
        if case.requires_grad:
            calls += redistribute(case, shapes[output], scattered, Replicate(), "backward")
        if "x" in case.requires_grad:
            calls += redistribute(case, shapes[x], Partial(), along, "backward")
    return tuple(calls)
