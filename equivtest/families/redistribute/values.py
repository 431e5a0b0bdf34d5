"""Draws values to redistribute: values that a copy must preserve, and terms whose reduction is exact.

Letters: k terms of one reduction, p significand bits of the dtype.

Each summed or averaged term has integers up to 2**p / k. So every partial sum, in any order and in steps over several
axes, is an integer up to 2**p, which is a value of the dtype. Averaged terms are multiples of k's odd part too, so that
dividing rounds nothing, before or after the sum. The oracle checks both for every draw.

If a case converts to float16, integers are at most 2**15, because float16 has no number above 65504.

Source: derived here; integers up to 2**p are values: IEEE 754-2019 section 3.3.
"""

from __future__ import annotations

import math

import torch

from equivtest.cases.values import draw
from equivtest.cases.values.integers import generator, hash_of, odd_floor, odd_integers, signs
from equivtest.cases.values.real import nearly_normal, without_subnormals
from equivtest.cases.values.special import draw_special
from equivtest.families.redistribute.case import REAL_MODE, RedistributeCase
from equivtest.tensors import DTYPES, SIGNIFICAND_BITS

_SCALES = (1.0, 0.1, 3.0)


@draw.register
def draw_redistribute(case: RedistributeCase, index: int) -> dict[str, torch.Tensor]:
    """Draws the global x and cotangent. A partial tensor is drawn as the stack of its terms.

    Modes:
        index: Elements count 1, 2, 3, ... through all terms, and begin again with 1 after the largest number, so that a
            wrong value shows its origin. Reduced terms have random signs.
        dense: Odd integers of random sign, as large as exact reductions allow.
        special: A third of the elements have one special value, a third are -0.0, and the others are odd integers. The
            special value has the number `seed` in `equivtest.cases.values.special`, which has signed zeros, infinities,
            NaN, subnormals and extremes. Reduced terms are as in the mode dense.
        real: Nearly normal numbers, but no zeros.
    """
    mode, seed = case.values[index]
    given = {name: _draw(case, name, mode, seed) for name in case.given_names()}
    return {
        name: tensor.to(DTYPES[case.output_dtype]) if name == "cotangent" else tensor for name, tensor in given.items()
    }


def _draw(case: RedistributeCase, name: str, mode: str, seed: int) -> torch.Tensor:
    shape, source, dtype = case.shapes()[name], generator(mode, seed, name), DTYPES[case.dtype]
    op, num_operands = case.reduction(name)
    if mode == "special" and not op:
        return draw_special(case.dtype, seed, shape, source)
    if mode == REAL_MODE:
        scale = _SCALES[hash_of(mode, seed, f"{name} scale") % len(_SCALES)]
        value = nearly_normal(shape, source) * scale
        return without_subnormals(value).to(dtype)
    factor = num_operands // (num_operands & -num_operands) if op == "avg" else 1
    bits = SIGNIFICAND_BITS[case.dtype] if "float16" not in case.dtypes else min(SIGNIFICAND_BITS[case.dtype], 15)
    largest = (2**bits - (num_operands == 1)) // (num_operands * factor)
    if mode == "index":
        numbers = torch.arange(math.prod(shape), device="cpu").remainder(largest).add_(1).mul_(factor).view(shape)
        return (numbers * signs(shape, source) if op else numbers).to(dtype)
    return (odd_integers(shape, 1, odd_floor(largest), source) * factor).to(dtype)
