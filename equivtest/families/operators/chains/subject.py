"""A chain of torch's own operators, called on DTensors.

Source: torch.distributed.tensor.DTensor, its redistribute, to_local and from_local (2.13.0).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from equivtest.families.operators.case_forms import Arguments
from equivtest.families.operators.chains.case import (
    REDISTRIBUTE,
    THROUGH_LOCAL,
    ChainCase,
    Special,
    Step,
    placements_named,
    run_chain,
    written,
)
from equivtest.families.operators.subject import run_operator
from equivtest.kit.subject import Answers, Given, placements_of
from equivtest.layout import Layout


def chains(case: ChainCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The results of all steps and, where they are asked for, the gradients of the operands."""
    return run_steps(case, mesh, given, special)


def run_steps(case: ChainCase, mesh: DeviceMesh, given: Given, other: Special) -> Answers:
    """The chain, with what the steps that are no operators do."""

    def call(case: ChainCase, operands: tuple[DTensor, ...], arguments: Arguments) -> tuple[Any, ...]:
        return run_chain(case.steps, operands, other)

    return run_operator(case, mesh, given, call)  # type: ignore[arg-type]


def special(step: Step, x: torch.Tensor) -> torch.Tensor:
    """What a step that is no operator does with a DTensor."""
    assert isinstance(x, DTensor)
    name = step[0]
    if name == REDISTRIBUTE:
        return x.redistribute(placements=placements_of(Layout(placements_named(step))))
    if name == THROUGH_LOCAL:
        return DTensor.from_local(
            x.to_local(), x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
        )
    return written(step, x)
