"""Computes sums of floating-point data as sums of integers, and proves that floating point cannot round them.

Letters: p significand bits of a dtype.

Derived here.  Write each tensor as integers times 2**e.  Every term of a sum of products is then
an integer times one common unit, a power of two.  If the magnitudes of the terms add up to at most
2**p units, every sum of any of the terms is an integer of at most 2**p units, and these are all
values of the dtype.  So each addition is exact, in any order, blocked or not, fused or not, and on
any number of ranks, also with an accumulator of more bits.  Nothing here knows how data was drawn:
the integers are read from the tensors, and the sums of magnitudes are computed in int64.

Source: integers up to 2**p are values: IEEE 754-2019 section 3.3 (every value is an integer below
2**p times a power of two, and 2**p is one as well); Higham, Accuracy and Stability of Numerical
Algorithms, 2nd ed., equation 2.1 says the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from equivtest.errors import EquivtestError

MAX_BITS = 62
"""Largest number of bits of a sum, so that int64 cannot overflow. One bit is left over."""


class InexactData(EquivtestError, AssertionError):
    """Raised if data breaks the conditions of exactness. The code that draws the data is at fault, not a subject."""


@dataclass(frozen=True)
class Scaled:
    """A global tensor of any shape, equal to integers * 2**exponent. The tensor `integers` is int64."""

    integers: torch.Tensor
    exponent: int

    def in_units(self, exponent: int) -> torch.Tensor:
        """Returns integers n such that the tensor is n * 2**exponent. The argument must not exceed `self.exponent`."""
        shift = self.exponent - exponent
        if bits_of(largest_of(self.integers)) + shift > MAX_BITS:
            raise InexactData(f"powers of two too far apart: 2**{self.exponent} in units of 2**{exponent}")
        return self.integers << shift


@dataclass(frozen=True)
class Sum:
    """Exact sums, and the number of bits that the sums need.

    Attributes:
        value: The exact sums, a global float64 tensor.
        bits_used: Smallest b for which each element's terms have magnitudes that add up to at most 2**b.
    """

    value: torch.Tensor
    bits_used: int


def significand_bits(dtype: torch.dtype) -> int:
    """Returns the number p of significand bits of a dtype, with the hidden bit: 24 for float32.

    Source: torch.finfo (2.13.0): eps is the distance from 1 to the next value, 2**(1 - p).
    """
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def bits_of(magnitude: int) -> int:
    """Returns the smallest b >= 1 with magnitude <= 2**b."""
    return max(1, (magnitude - 1).bit_length())


def find_integers(name: str, tensor: torch.Tensor) -> Scaled:
    """Returns `tensor` as integers times the largest power of two that divides every element.

    Raises:
        InexactData: an element is infinite or NaN, or the integers do not fit 62 bits.

    Source: torch.frexp (2.13.0): value = fraction * 2**exponent, 0.5 <= |fraction| < 1.
    """
    values = tensor.to(torch.float64)
    if not bool(torch.isfinite(values).all()):
        raise InexactData(f"{name} has infinite or NaN elements")
    nonzero = values[values != 0]
    if nonzero.numel() == 0:
        return Scaled(torch.zeros(values.shape, dtype=torch.int64), 0)
    fractions, exponents = torch.frexp(nonzero)
    significands = (fractions * 2.0**53).to(torch.int64)
    last_bits = (significands & -significands).to(torch.float64)  # powers of two
    exponent = int((exponents + torch.frexp(last_bits).exponent).min()) - 54
    if int(exponents.max()) - exponent > MAX_BITS or not -1022 <= exponent <= 1022:
        raise InexactData(f"{name} spans too many powers of two to be integers of {MAX_BITS} bits")
    return Scaled((values * 2.0**-exponent).to(torch.int64), exponent)


def sum_products(
    name: str, left: Scaled, right: Scaled, dtype: torch.dtype, *, plus: Scaled | None = None, divided_by: int = 1
) -> Sum:
    """Returns the exact left @ right + plus, after a proof that no order of summation rounds it in `dtype`.

    Args:
        left, right: Matrices of the shapes (rows, terms) and (terms, columns).
        plus: Vector of shape (columns,) that is added to each row. None if nothing is added.
        divided_by: Number n such that a program may add plus / n on each of n ranks. The proof covers such a program,
            so each element of `plus` must be a multiple of n's odd part. If n is 1, a program adds `plus` once.

    Raises:
        InexactData: an element of `plus` is not divisible by n's odd part, or the magnitudes of the terms of a sum add
            up to more than 2**p units. This is the largest sum that `dtype` can certainly represent.
    """
    unit = left.exponent + right.exponent
    added = None
    if plus is not None:
        free = (divided_by & -divided_by).bit_length() - 1  # halving is exact: it only lowers the unit
        unit = min(unit, plus.exponent - free)
        added = plus.in_units(unit)
        if bool((added % divided_by != 0).any()):
            raise InexactData(f"{name}: the bias is no multiple of {divided_by}, so its share per rank is rounded")
    factors = Scaled(left.integers, left.exponent).in_units(unit - right.exponent)
    terms = torch.matmul(factors.abs().to(torch.float64), right.integers.abs().to(torch.float64))
    if added is not None:
        terms = terms + added.abs()
    if terms.numel() and float(terms.max()) > 2.0**MAX_BITS:  # only then could int64 overflow
        raise InexactData(f"{name}: a sum may reach more than 2**{MAX_BITS} units")
    sums = torch.matmul(factors, right.integers)
    magnitudes = torch.matmul(factors.abs(), right.integers.abs())
    if added is not None:
        sums, magnitudes = sums + added, magnitudes + added.abs()
    bits_used, bits = bits_of(largest_of(magnitudes)), significand_bits(dtype)
    if bits_used > bits:
        raise InexactData(
            f"{name}: a sum may reach {largest_of(magnitudes)} units, but {dtype} is exact only up to 2**{bits}"
        )
    return Sum(torch.ldexp(sums.to(torch.float64), torch.tensor(unit)), bits_used)


def sum_terms(name: str, terms: Scaled, dtype: torch.dtype, *, times: int = 1) -> Sum:
    """Returns the exact sum over the first dim, after a proof that no order of summation rounds it in `dtype`.

    Args:
        terms: Tensor of shape (terms, columns). The sum has the shape (columns,).
        times: Largest number of operands that the ranks may add to get one term. Each operand is at most as large as
            the term.

    Raises:
        InexactData: the sum of the magnitudes, multiplied by `times`, exceeds 2**p units. This is the largest sum that
            `dtype` can certainly represent.
    """
    factors = Scaled(torch.full((1, len(terms.integers)), times, dtype=torch.int64), 0)
    total = sum_products(name, factors, terms, dtype)
    return Sum(total.value[0] / times, total.bits_used)


def largest_of(integers: torch.Tensor) -> int:
    return int(integers.abs().max()) if integers.numel() else 0
