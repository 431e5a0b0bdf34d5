"""Values that arithmetic treats in its own way, as bit patterns: what only a copy preserves."""

from __future__ import annotations

import torch

from equivtest.cases.integers import SIGNIFICAND_BITS
from equivtest.tensors import DTYPES

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers that are as wide as a floating-point number of so many bytes."""

NUM_PATTERNS = 2**16
"""Bit patterns of a dtype of 16 bits."""


def special_patterns(dtype_name: str) -> tuple[int, ...]:
    """Bit patterns of a dtype, as unsigned integers; NUM_SPECIAL of them.

    In pairs of one sign each: zero, infinity, quiet NaN without a payload; quiet NaN of payload 1
    and of all ones; signalling NaN of payload 1 and of all ones; then in pairs of both signs the
    smallest and largest subnormal, the smallest and largest normal number, 1, and 1 with its last
    bit set.

    Source: IEEE 754-2019 sections 3.4 (sign, biased exponent, stored significand bits) and 6.2.1:
    the first stored bit of a quiet NaN is 1, of a signalling one 0.
    """
    stored = SIGNIFICAND_BITS[dtype_name] - 1
    width = DTYPES[dtype_name].itemsize * 8
    sign, quiet, fractions = 1 << (width - 1), 1 << (stored - 1), (1 << stored) - 1
    infinity = sign - (1 << stored)
    one = ((1 << (width - 2 - stored)) - 1) << stored
    nans = (infinity | quiet | 1, sign | infinity | fractions, infinity | 1, sign | infinity | (quiet - 1))
    both = (0, infinity, infinity | quiet)
    finite = (1, fractions, fractions + 1, infinity - 1, one, one + 1)
    return (
        *(pattern for bits in both for pattern in (bits, sign | bits)),
        *nans,
        *(pattern for bits in finite for pattern in (bits, sign | bits)),
    )


NUM_SPECIAL = len(special_patterns("float32"))


def draw_special(dtype_name: str, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Special values number start, start + 1, ..., again from 0 after the last: `shape`, global."""
    patterns = special_patterns(dtype_name)
    return from_patterns([patterns[(start + place) % len(patterns)] for place in range(_numel(shape))], dtype_name, shape)


def draw_patterns(dtype_name: str, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Every bit pattern from number `start` on, again from 0 after the last: `shape`, global."""
    running = (torch.arange(_numel(shape), device="cpu") + start) % NUM_PATTERNS
    return _as_floats(running, dtype_name).view(shape)


def from_patterns(patterns: list[int], dtype_name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The numbers that have these bits, unsigned integers: `shape`, global."""
    width = DTYPES[dtype_name].itemsize * 8
    signed = [pattern - (1 << width) if pattern >> (width - 1) else pattern for pattern in patterns]
    return _as_floats(torch.tensor(signed, dtype=torch.int64, device="cpu"), dtype_name).view(shape)


def _as_floats(integers: torch.Tensor, dtype_name: str) -> torch.Tensor:
    """int64 cut to the dtype's width, and taken for numbers of it."""
    dtype = DTYPES[dtype_name]
    return integers.to(INTEGERS[dtype.itemsize]).view(dtype)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
