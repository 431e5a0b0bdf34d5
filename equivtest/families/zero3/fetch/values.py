"""Draws the values of parameters that are fetched."""

from __future__ import annotations

import math

import torch

from equivtest.cases.values import draw
from equivtest.cases.values.integers import generator, odd_integers, other_dtype, signs
from equivtest.cases.values.special import INTEGERS, draw_patterns, draw_special
from equivtest.families.zero3.fetch.case import FetchCase, RefusedFetchCase
from equivtest.tensors import DTYPES, SIGNIFICAND_BITS


@draw.register
def draw_fetch(case: FetchCase, index: int) -> dict[str, torch.Tensor]:
    """Draws the global parameters, named `param.i` with their number i.

    Modes, the first three without zeros:

        dense: Odd integers of random sign, below 2**p in magnitude, for p significand bits.
        index: Elements count 1, 2, 3, ... through all parameters, and begin again with 1 after 2**p - 1, so that a
            wrong value shows its origin.
        wide: All significand bits and all normal exponents of the dtype.
        special: A third of the elements have one special value, a third are -0.0, and the others are odd integers. The
            special value has the number `seed` in `equivtest.cases.values.special`, which has signed zeros, infinities,
            NaN, subnormals and extremes.
        every-bit-pattern: All patterns of 16 bits in turn, through all parameters, from `seed` on.
    """
    mode, seed = case.values[index]
    largest = 2 ** SIGNIFICAND_BITS[case.dtype] - 1
    dtype = DTYPES[case.dtype]
    given = {}
    num_before = 0
    for name, shape in zip(case.given_names(), case.parameters, strict=True):
        source = generator(mode, seed, name)
        if mode == "index":
            running = torch.arange(num_before, num_before + math.prod(shape), device="cpu")
            given[name] = (running % largest + 1).to(dtype).view(shape)
        elif mode == "dense":
            given[name] = odd_integers(shape, 1, largest, source).to(dtype)
        elif mode == "special":
            given[name] = draw_special(case.dtype, seed, shape, source)
        elif mode == "every-bit-pattern":
            given[name] = draw_patterns(case.dtype, seed + num_before, shape)
        else:
            given[name] = _draw_all_exponents(shape, dtype, SIGNIFICAND_BITS[case.dtype], source)
        num_before += math.prod(shape)
    return given


@draw.register
def draw_refused_fetch(case: RefusedFetchCase, index: int) -> dict[str, torch.Tensor]:
    given = draw_fetch(case, index)
    if case.misfit == "dtype":
        last = case.given_names()[-1]
        given[last] = given[last].to(other_dtype(case.dtype))
    return given


def _draw_all_exponents(
    shape: tuple[int, ...], dtype: torch.dtype, significand_bits: int, source: torch.Generator
) -> torch.Tensor:
    """Draws normal numbers of random sign and exponent whose last significand bit is set.

    Source: IEEE 754-2019 section 3.4: sign, biased exponent (0 and all ones are not normal
    numbers), then significand_bits - 1 stored bits.
    """
    stored_bits = significand_bits - 1
    exponent_bits = dtype.itemsize * 8 - significand_bits
    exponents = torch.randint(1, 2**exponent_bits - 1, shape, generator=source, device="cpu")
    fractions = torch.randint(0, 2**stored_bits, shape, generator=source, device="cpu") | 1
    bits = (exponents << stored_bits) | fractions
    return bits.to(INTEGERS[dtype.itemsize]).view(dtype) * signs(shape, source).to(dtype)
