"""Draws special values, such as NaN and -0.0, as bit patterns that only a copy preserves."""

from __future__ import annotations

import torch

from equivtest.cases.values.integers import odd_integers
from equivtest.tensors import DTYPES, SIGNIFICAND_BITS

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a floating-point dtype -> integer dtype of the same width."""

NUM_PATTERNS = 2**16


def special_patterns(dtype_name: str) -> tuple[int, ...]:
    """Returns NUM_SPECIAL bit patterns of a dtype as unsigned integers, with each kind of special value and each sign.

    The kinds are zero, infinity, quiet NaN without a payload, the smallest and the largest subnormal number, the
    smallest and the largest normal number, 1, and 1 with its last bit set.  There are also quiet and signalling NaN
    with a payload: 1 for a positive NaN, all bits 1 for a negative NaN.

    Source: IEEE 754-2019 sections 3.4 (sign, biased exponent, stored significand bits) and 6.2.1: the first stored bit
    of a quiet NaN is 1, of a signalling NaN 0.
    """
    stored = SIGNIFICAND_BITS[dtype_name] - 1
    width = DTYPES[dtype_name].itemsize * 8
    sign, quiet, fractions = 1 << (width - 1), 1 << (stored - 1), (1 << stored) - 1
    infinity = sign - (1 << stored)
    one = ((1 << (width - 2 - stored)) - 1) << stored
    nans = (infinity | quiet | 1, sign | infinity | fractions, infinity | 1, sign | infinity | (quiet - 1))
    finite = (1, fractions, fractions + 1, infinity - 1, one, one + 1)
    return (
        *(sign, 0),
        *(infinity, sign | infinity),
        *(infinity | quiet, sign | infinity | quiet),
        *nans,
        *(pattern for bits in finite for pattern in (bits, sign | bits)),
    )


NUM_SPECIAL = len(special_patterns("float32"))


def draw_special(dtype_name: str, number: int, shape: tuple[int, ...], source: torch.Generator) -> torch.Tensor:
    """Draws a global tensor in which one special value occurs several times.

    The first element and a third of the other elements have the special value. Another third is -0.0, the only value
    that is lost when zeros are added. The rest are odd integers. Each draw has only one kind of special value, so that
    a failure shrinks to this value.

    Args:
        number: Index into `special_patterns`, taken modulo the number of patterns.
    """
    patterns = special_patterns(dtype_name)
    special, minus_zero = (_as_floats(torch.tensor(_signed(pattern, dtype_name)), dtype_name)
                           for pattern in (patterns[number % NUM_SPECIAL], patterns[0]))  # fmt: skip
    kinds = torch.randint(3, shape, generator=source, device="cpu")
    kinds.view(-1)[:1] = 0
    ordinary = odd_integers(shape, 1, 2 ** SIGNIFICAND_BITS[dtype_name] - 1, source).to(DTYPES[dtype_name])
    return torch.where(kinds == 0, special, torch.where(kinds == 1, minus_zero, ordinary))


def draw_patterns(dtype_name: str, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Draws a global tensor of consecutive bit patterns, from number `start`.  Number 0 follows the last pattern."""
    running = (torch.arange(torch.Size(shape).numel(), device="cpu") + start) % NUM_PATTERNS
    return _as_floats(running, dtype_name).view(shape)


def _signed(pattern: int, dtype_name: str) -> int:
    width = DTYPES[dtype_name].itemsize * 8
    return pattern - (1 << width) if pattern >> (width - 1) else pattern


def _as_floats(integers: torch.Tensor, dtype_name: str) -> torch.Tensor:
    """Cuts int64 integers to the dtype's width, and reinterprets their bits as numbers of the dtype."""
    dtype = DTYPES[dtype_name]
    return integers.to(INTEGERS[dtype.itemsize]).view(dtype)
