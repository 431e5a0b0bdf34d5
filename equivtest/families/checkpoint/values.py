"""Draws values that only a copy preserves."""

from __future__ import annotations

import math

import torch

from equivtest.cases.values import draw
from equivtest.cases.values.integers import generator, odd_integers
from equivtest.cases.values.special import draw_special
from equivtest.families.checkpoint.case import CheckpointCase
from equivtest.tensors import DTYPES, SIGNIFICAND_BITS


@draw.register
def draw_checkpoint(case: CheckpointCase, index: int) -> dict[str, torch.Tensor]:
    """Draws the global tensor x.

    Modes:
        dense: Odd integers of random sign.
        index: Elements count 1, 2, 3, ..., and begin again with 1 after the largest integer of the dtype, so that a
            wrong value shows its origin.
        special: Special values, such as -0.0 and NaN with a payload; see `draw_special`.
    """
    mode, seed = case.values[index]
    source, largest = generator(mode, seed, "x"), 2 ** SIGNIFICAND_BITS[case.dtype] - 1
    if mode == "special":
        return {"x": draw_special(case.dtype, seed, case.shape, source)}
    if mode == "dense":
        return {"x": odd_integers(case.shape, 1, largest, source).to(DTYPES[case.dtype])}
    numbers = torch.arange(math.prod(case.shape), device="cpu").remainder(largest).add_(1)
    return {"x": numbers.view(case.shape).to(DTYPES[case.dtype])}
