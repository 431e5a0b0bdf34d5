"""Draws values that only a copy preserves."""

from __future__ import annotations

import math

import torch

from equivtest.cases.case import Shape
from equivtest.cases.values import draw
from equivtest.cases.values.integers import generator, odd_integers
from equivtest.cases.values.special import draw_special
from equivtest.families.checkpoint.case import CheckpointCase
from equivtest.tensors import DTYPES, SIGNIFICAND_BITS


@draw.register
def draw_checkpoint(case: CheckpointCase, index: int) -> dict[str, torch.Tensor]:
    """Draws the global tensor x, and y if the case has one.

    Modes:
        dense: Odd integers of random sign.
        index: Elements count 1, 2, 3, ..., and begin again with 1 after the largest integer of the dtype, so that a
            wrong value shows its origin. y counts on from x.
        special: Special values, such as -0.0 and NaN with a payload; see `draw_special`.
    """
    first, drawn = 0, {}
    for name, shape in case.shapes_saved.items():
        drawn[name] = _draw_tensor(case, index, name, shape, first)
        first += math.prod(shape)
    return drawn


def _draw_tensor(case: CheckpointCase, index: int, name: str, shape: Shape, first: int) -> torch.Tensor:
    mode, seed = case.values[index]
    source, largest = generator(mode, seed, name), 2 ** SIGNIFICAND_BITS[case.dtype] - 1
    if mode == "special":
        return draw_special(case.dtype, seed, shape, source)
    if mode == "dense":
        return odd_integers(shape, 1, largest, source).to(DTYPES[case.dtype])
    numbers = torch.arange(first, first + math.prod(shape), device="cpu").remainder(largest).add_(1)
    return numbers.view(shape).to(DTYPES[case.dtype])
