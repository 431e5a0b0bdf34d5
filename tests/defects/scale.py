"""Products that are wrong in one way each."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from equivtest.families.scale.case import ScaleCase
from equivtest.families.scale.subject import run_scale
from tests.defects.defect import argument_of, defect


@defect(
    replaces="scale",
    family="a term added on every rank",
    claim="equals_unsharded",
    smallest=ScaleCase(world_size=2, requires_grad=()),
    why="one rank's share is the whole",
)
@argument_of(run_scale)
def scaled_by_every_rank(case: ScaleCase, x: torch.Tensor) -> torch.Tensor:
    """The factor is applied once for each rank."""
    assert isinstance(x, DTensor)
    return x * case.factor * x.device_mesh.size()


@defect(
    replaces="scale",
    family="a term missing",
    claim="gradients_equal_unsharded",
    smallest=ScaleCase(world_size=1),
    why="one element shows it",
)
@argument_of(run_scale)
def gradient_not_scaled(case: ScaleCase, x: torch.Tensor) -> torch.Tensor:
    """What is added to x for the product has no gradient."""
    return x + (x * (case.factor - 1)).detach()
