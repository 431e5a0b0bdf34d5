"""Operands of collectives: what a copy must preserve, and terms and factors whose reduction is exact.

Letters: w ranks, p significand bits of the dtype, o the odd part of w.

Terms of a sum are integers up to 2**p / w, so that every sum of any of them is an integer up to 2**p: a value
of the dtype, in any order.  Those of an average are multiples of o too, so that dividing rounds nothing, be
it before or after the sum; where w * o is more than 2**p, only some ranks' are not zero.  Factors are 2 and
1/2, of at most 8 ranks, and 1: every product of any of them is a power of two from 2**-8 to 2**8.  What is
compared has whole significands, and no zeros, whose signs a maximum may take as it likes.

Source: derived here; integers up to 2**p are values: IEEE 754-2019 section 3.3.
"""

from __future__ import annotations

import torch

from equivtest.families.collectives.case import CollectivesCase
from equivtest.kit.values import draw
from equivtest.kit.values.integers import generator, odd_floor, odd_integers, signs
from equivtest.kit.values.special import draw_special
from equivtest.tensors import DTYPES, SIGNIFICAND_BITS

MAX_FACTORS = 8
"""Ranks whose factor of one element is not 1 or -1: 2**8 and 2**-8 are normal numbers of float16."""


@draw.register
def draw_collectives(case: CollectivesCase, index: int) -> dict[str, torch.Tensor]:
    """Global operands (w, w * L), one row per rank, of every kind that the case's collectives take.

    Modes, which differ in what is copied alone:
        dense: Odd integers of random sign, below 2**p.
        index: 1, 2, 3, ... through all elements and ranks, again from 1 after 2**p - 1: a wrong value tells
            where it came from.
        special: One of signed zeros, infinities, NaN, subnormals and extremes, the one that has the number
            `seed`, between -0.0 and odd integers.
    """
    mode, seed = case.values[index]
    return {name: _draw(case, name, mode, seed).to(DTYPES[case.dtype]) for name in case.given_names()}


def _draw(case: CollectivesCase, name: str, mode: str, seed: int) -> torch.Tensor:
    shape, source, ranks = case.shapes()[name], generator(mode, seed, name), case.world_size
    most = 2 ** SIGNIFICAND_BITS[case.dtype]
    if name == "moved" and mode == "special":
        return draw_special(case.dtype, seed, shape, source)
    if name == "moved" and mode == "index":
        return torch.arange(ranks * case.width, device="cpu").remainder(most - 1).add_(1).view(shape)
    if name == "added":
        return odd_integers(shape, 1, odd_floor(most // ranks), source)
    if name == "averaged":
        odd = ranks // (ranks & -ranks)
        stride = -(-ranks // min(ranks, most // odd))
        largest = most // (-(-ranks // stride) * odd)
        terms = odd_integers(shape, 1, odd_floor(largest), source) * odd
        return terms if stride == 1 else torch.where(_every(stride, shape), terms, 0)
    if name == "multiplied":
        factors, stride = 2.0 ** signs(shape, source), -(-ranks // MAX_FACTORS)
        return (factors if stride == 1 else torch.where(_every(stride, shape), factors, 1.0)) * signs(shape, source)
    return odd_integers(shape, 1, most - 1, source)


def _every(stride: int, shape: tuple[int, ...]) -> torch.Tensor:
    """True in every `stride`-th row of a column, shifted from column to column: `shape`, bool."""
    rows, columns = (torch.arange(size, device="cpu") for size in shape)
    return (rows[:, None] + columns) % stride == 0
