"""Draws values for refused cross entropies of DTensors."""

from __future__ import annotations

import torch

from equivtest.cases.values import draw
from equivtest.cases.values.integers import hash_of
from equivtest.families.cross_entropy.gathered.case import RefusedGatheredCrossEntropyCase
from equivtest.families.cross_entropy.values import draw_cross_entropy


@draw.register
def draw_refused_gathered(case: RefusedGatheredCrossEntropyCase, index: int) -> dict[str, torch.Tensor]:
    """Draws a valid case, except that one target is num_classes for the misfit 'above', and -1 for 'below'."""
    given = draw_cross_entropy(case, index)
    if case.misfit in ("above", "below"):
        place = hash_of(*case.values[index], "misfit") % case.num_positions
        given["target"].view(-1)[place] = case.num_classes if case.misfit == "above" else -1
    return given
