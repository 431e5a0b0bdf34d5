"""Draws values for operations on ZeRO-3's parameters, so that no operation can round.

Letters: w ranks, p significand bits, m ranks with nonzero cotangents, g the largest cotangent divided by w, b the
largest magnitude of a parameter.

Cotangents are multiples of w, so that averages over ranks are integers. In one use the ranks' gradients add up to at
most w m g. All gradients between two steps add up to at most MAX_OPERATIONS m g. A step subtracts half of this sum, so
that parameters are at most 2 b + MAX_OPERATIONS m g units of 1/2. All three limits are at most 2**p, so every partial
sum is a value of the dtype: see `equivtest.oracle.exact`. The oracle proves this for the drawn numbers.
"""

from __future__ import annotations

import math

import torch

from equivtest.cases.values import draw
from equivtest.cases.values.integers import generator, odd_floor, odd_integers, permutation, signs
from equivtest.families.zero3.lifecycle.case import MAX_OPERATIONS, LifecycleCase
from equivtest.tensors import DTYPES, SIGNIFICAND_BITS

LARGEST_QUOTIENT = 99
"""Largest g. A larger one would only leave fewer bits to the parameters."""


@draw.register
def draw_lifecycle(case: LifecycleCase, index: int) -> dict[str, torch.Tensor]:
    """Draws the global tensors of all operations and parameters.

    Modes:
        dense: Parameters and their new values are odd integers of random sign.
        index: Parameters count 1, 2, 3, ..., and their new values count -1, -2, -3, ..., so that a wrong value shows
            its origin.

    In every mode x has random signs, and a cotangent is the number of ranks times odd integers of random sign.
    """
    mode, seed = case.values[index]
    bits = min(SIGNIFICAND_BITS[case.dtype_of(number)] for number in range(case.num_parameters))
    contributing, quotient, largest = budget(case.world_size, bits)
    shapes, given = case.shapes(), {}
    for name in case.given_names():
        source = generator(mode, seed, name)
        kind, number = name.split(".")[-2:]
        if kind == "x":
            values = signs(shapes[name], source)
        elif kind == "cotangent":
            values = odd_integers(shapes[name], 1, quotient, source) * case.world_size
            values[permutation(case.world_size, source)[contributing:]] = 0
        elif mode == "index":
            values = (torch.arange(math.prod(shapes[name]), device="cpu") % largest + 1).reshape(shapes[name])
            values = -values if kind == "new" else values
        else:
            values = odd_integers(shapes[name], 1, largest, source)
        given[name] = values.to(DTYPES[case.dtype_of(int(number))])
    return given


def budget(world_size: int, significand_bits: int) -> tuple[int, int, int]:
    """Returns (m, g, b), the largest numbers with which no operation rounds. g and b are odd."""
    largest = 2**significand_bits
    contributing = min(world_size, largest // world_size, largest * 3 // 4 // MAX_OPERATIONS)
    quotient = min(LARGEST_QUOTIENT, largest // world_size // contributing)
    quotient = odd_floor(min(quotient, largest * 3 // 4 // (MAX_OPERATIONS * contributing)))
    return contributing, quotient, odd_floor((largest - MAX_OPERATIONS * contributing * quotient) // 2)
