"""Draws operands of collectives: values that a copy must preserve, and terms and factors whose reduction is exact.

Letters: w ranks, p significand bits of the dtype, o the largest odd divisor of w. A column has the elements of all
ranks at one position.

Terms of a sum are integers up to 2**p / w, so that every partial sum, in any order, is an integer up to 2**p, which is
a value of the dtype. Terms of an average are multiples of o too, so that dividing rounds nothing, before or after the
sum. If w * o is more than 2**p, only some ranks' terms are not zero. Factors of a product are 2 and 1/2 on at most 8
ranks, and 1 on all other ranks. Each factor has a random sign. So the magnitude of every partial product is a power of
two from 2**-8 to 2**8. Compared values use all bits of the significand. They are never zero, because a maximum may
choose either sign of zero.

In the mode 'special' every second column of added or compared values is at the limits of the dtype (`_at_limits`). A
sum of such a column is infinite, overflows or is the largest number. A maximum or minimum of such a column is chosen
among infinities, or among infinities and largest numbers. No column has infinities of both signs as terms, and no
column has a NaN, because a sum that is NaN and a maximum beside a NaN have no documented value.

Source: derived here; integers up to 2**p are values: IEEE 754-2019 section 3.3; an overflow is infinite with rounding
to nearest: section 7.4.  torch.amp.GradScaler (2.13.0) relies on that for reduced gradients: it skips steps with
infinite gradients.
"""

from __future__ import annotations

import math

import torch

from equivtest.cases.values import draw
from equivtest.cases.values.integers import generator, odd_floor, odd_integers, signs
from equivtest.cases.values.special import draw_special
from equivtest.families.collectives.case import CollectivesCase
from equivtest.tensors import DTYPES, SIGNIFICAND_BITS

MAX_FACTORS = 8
"""Number of ranks whose factor of one element is not 1 or -1: 2**8 and 2**-8 are normal numbers of float16."""


@draw.register
def draw_collectives(case: CollectivesCase, index: int) -> dict[str, torch.Tensor]:
    """Draws global operands, one row per rank, of every kind that the case's collectives need.

    Modes; the first two differ only in copied values:
        dense: Odd integers of random sign, below 2**p.
        index: Elements count 1, 2, 3, ... through all ranks, and begin again with 1 after 2**p - 1, so that a wrong
            value shows its origin.
        special: A third of the elements have one special value, a third are -0.0, and the others are odd integers. The
            special value has the number `seed` in `equivtest.cases.values.special`, which has signed zeros, infinities,
            NaN, subnormals and extremes. Reduced values are at the limits of the dtype in every second column.
    """
    mode, seed = case.values[index]
    given = {name: _draw(case, name, mode, seed).to(DTYPES[case.dtype]) for name in case.given_names()}
    if mode == "special":
        given |= {name: _at_limits(name, given[name], seed) for name in LIMITS if name in given}
    return given


LIMITS = ("added", "compared")
"""Kinds of operands that are also reduced at the limits of the dtype."""


def _at_limits(name: str, ordinary: torch.Tensor, seed: int) -> torch.Tensor:
    """Returns the operands, one row per rank, with values at the limits of the dtype in every second column.

    The kinds of columns alternate, and each occurs with both signs.

        added      one infinite term; each term 1.5 times the largest power of two; or a sum that is the largest number,
                   of one large term and, from each other rank, one unit in the last place of the largest number
        compared   only infinities; or each term an infinity or a largest number
    """
    num_terms = 3 if name == "added" else 2
    number = torch.arange(ordinary.shape[1], device="cpu")
    kind = (number + seed) // 2 % (2 * num_terms)
    found = ordinary.clone()
    for each in range(2 * num_terms):  # kind by kind, because one of 64 ranks must not need a gigabyte
        columns = ((number + seed) % 2 == 0).logical_and(kind == each).nonzero()[:, 0]
        term = _term(name, each % num_terms, ordinary[:, columns], (columns, seed))
        found[:, columns] = (term if each < num_terms else -term).to(ordinary.dtype)
    return found


def _term(name: str, kind: int, ordinary: torch.Tensor, of: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Returns the values of one kind of columns. `of` is (numbers of the columns, seed)."""
    (number, seed), (ranks, _), info = of, ordinary.shape, torch.finfo(ordinary.dtype)
    rank = torch.arange(ranks, device="cpu")[:, None]
    is_one = number % ranks == rank
    largest, infinite = (torch.full(ordinary.shape, value, dtype=torch.float64) for value in (info.max, math.inf))
    if name == "compared":
        is_positive = (number + rank + seed) % 2 == 0
        return infinite if kind == 0 else torch.where(is_one, infinite, torch.where(is_positive, largest, -largest))
    power = 2.0 ** (math.frexp(info.max)[1] - 1)
    if kind == 0:
        return torch.where(is_one, infinite, ordinary.double().abs())
    if kind == 1:
        return torch.full_like(largest, 1.5 * power)
    units = torch.full_like(largest, power * info.eps)
    return torch.where(is_one, largest - (ranks - 1) * units, units)


def _draw(case: CollectivesCase, name: str, mode: str, seed: int) -> torch.Tensor:
    shape, source, ranks = case.shapes()[name], generator(mode, seed, name), case.world_size
    most = 2 ** SIGNIFICAND_BITS[case.dtype]
    if name == "moved" and mode == "special":
        return draw_special(case.dtype, seed, shape, source)
    if name == "moved" and mode == "index":
        return torch.arange(ranks * case.width, device="cpu").remainder(most - 1).add_(1).view(shape)
    if name in ("added", "counted"):
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
    """Returns a mask with True in every `stride`-th row. The first such row changes from one column to the next."""
    rows, columns = (torch.arange(size, device="cpu") for size in shape)
    return (rows[:, None] + columns) % stride == 0
