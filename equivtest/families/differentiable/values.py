"""Draws operands and cotangents of differentiable collectives: integers whose sums over all ranks are exact."""

from __future__ import annotations

import torch

from equivtest.cases.values import draw
from equivtest.cases.values.integers import generator, odd_floor, odd_integers
from equivtest.families.differentiable.case import DifferentiableCase
from equivtest.tensors import DTYPES, SIGNIFICAND_BITS


@draw.register
def draw_differentiable(case: DifferentiableCase, index: int) -> dict[str, torch.Tensor]:
    """Draws odd integers of random sign, up to 2**p / world_size for p significand bits, so that no sum rounds."""
    mode, seed = case.values[index]
    most = odd_floor(2 ** SIGNIFICAND_BITS[case.dtype] // case.world_size)
    return {
        name: odd_integers(case.shapes()[name], 1, most, generator(mode, seed, name)).to(DTYPES[case.dtype])
        for name in case.given_names()
    }
