"""Chains that are wrong in one way each: state survives a call, or is lost between two calls."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from equivtest.cases.subject import Answers, Given
from equivtest.families.operators.case_forms import Arguments
from equivtest.families.operators.chains.case import SPECIALS, THROUGH_LOCAL, ChainCase, Step, run_chain
from equivtest.families.operators.chains.subject import run_steps, special
from equivtest.families.operators.subject import run_operator
from tests.defects.defect import Replacing, argument_of

wrong = Replacing("dtensor_operator_chains")


@wrong(
    "a cache keyed too coarsely",
    ChainCase(
        world_size=1,
        steps=(("mul", ("x0",), (("other", 2.0),)), ("mul", ("x0",), (("other", -3),))),
        placements=(("replicate",),),
    ),
    "one call has nothing to be mistaken for",
)
def scalar_of_the_first_call(case: ChainCase, mesh: DeviceMesh, given: Given) -> Answers:
    """An operator called again, of as many operands, has the arguments of its first call."""

    def call(case: ChainCase, operands: tuple[DTensor, ...], arguments: Arguments) -> tuple[Any, ...]:
        first: dict[tuple[str, int], Arguments] = {}
        steps = tuple(
            (name, taken, how if name in SPECIALS else first.setdefault((name, len(taken)), how))
            for name, taken, how in case.steps
        )
        return run_chain(steps, operands, special)

    return run_operator(case, mesh, given, call)  # type: ignore[arg-type]


@wrong(
    "a reduction missing in the backward",
    ChainCase(
        world_size=2,
        steps=((THROUGH_LOCAL, ("x0",), ()),),
        operands=((2,),),
        placements=(("replicate",),),
        requires_grad=(0,),
    ),
    "one rank has the whole cotangent",
    claim="gradients_equal_unsharded",
)
@argument_of(run_steps)
def gradient_left_out_of_dtensors(step: Step, x: torch.Tensor) -> torch.Tensor:
    """A replica leaves DTensors and comes back as one: each rank's whole gradient counts as a share."""
    assert isinstance(x, DTensor)
    if step[0] != THROUGH_LOCAL or x.placements != (Replicate(),):
        return special(step, x)
    local = x.to_local(grad_placements=[Partial("sum")])
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
