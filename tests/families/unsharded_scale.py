"""The unsharded product."""

from __future__ import annotations

import torch

from equivtest.families.scale.case import ScaleCase
from tests.unsharded import answers_of, unsharded


@unsharded.register
def unsharded_scale(case: ScaleCase, index: int) -> dict[str, torch.Tensor]:
    """A tensor times a number, forward and backward."""
    return answers_of(case, index, lambda given: given["x"] * case.factor)
