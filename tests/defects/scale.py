"""Products that are wrong in one way each."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from equivtest.families.scale.case import ScaleCase
from equivtest.families.scale.subject import run_scale
from tests.defects.defect import Replacing, argument_of

wrong = Replacing("scale")


@wrong("a term added on every rank", ScaleCase(world_size=2, requires_grad=()), "one rank's share is the whole")
@argument_of(run_scale)
def scaled_by_every_rank(case: ScaleCase, x: torch.Tensor) -> torch.Tensor:
    """The factor is applied once for each rank."""
    assert isinstance(x, DTensor)
    return x * case.factor * x.device_mesh.size()


@wrong("a term missing", ScaleCase(world_size=1), "one element shows it", claim="gradients_equal_unsharded")
@argument_of(run_scale)
def gradient_not_scaled(case: ScaleCase, x: torch.Tensor) -> torch.Tensor:
    """The part of the product that is added to x has no gradient."""
    return x + (x * (case.factor - 1)).detach()
