"""Reduces the operands of a reduction, exactly if the values of the operands allow it, and with a bound if they do not.

Letters: k operands of one reduction, u_r and u_o unit roundoffs of a collective's additions and of
storage.

The largest or smallest of k operands is one of these operands. A sum of exact data has the same value in any order. An
average of exact data has the same value in any order under two conditions. First, the operands are multiples of k's odd
part. Second, fl(1 / k), by which a backend may multiply instead of dividing by k, is near enough to 1 / k
(`equivtest.oracle.averages`). A product of powers of two is exact if no product of some of these powers overflows or is
subnormal.

Each real operand takes part in at most k - 1 rounded additions, in any order and in steps over several axes.  An
average also rounds a reciprocal and a product for each axis.  Errors of additions prefer no sign.  Errors of an
average may, because all elements share the rounding error of the same reciprocal.

Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2.  Exactness of sums:
`equivtest.oracle.exact`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from equivtest.oracle.averages import reciprocal_is_near
from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.exact import InexactData, find_integers, largest_of, sum_terms
from equivtest.oracle.rounding import bounded, growth, where_finite
from equivtest.tensors import DTYPES

BITWISE = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
"""Reductions of whole numbers, bit by bit."""


@dataclass(frozen=True)
class Reduced:
    """The right result of a reduction, either exact or with a bound.

    Attributes:
        bits: The result in the dtype of the operands, if only one result is right. None if several results are right.
        allowed: Largest error per element, a float64 tensor. If None, a correct result equals `value`.
        is_symmetric: True if the errors of a correct reduction prefer no sign, and share no rounding.
    """

    value: torch.Tensor
    bits: torch.Tensor | None
    allowed: torch.Tensor | None
    derivation: str
    bits_used: int = 0
    is_symmetric: bool = False


def reduce_exactly(name: str, operands: torch.Tensor, op: str, axes: Sequence[int]) -> Reduced:
    """Reduces operands (k, *shape) to the result (*shape) that every order of the reduction gives, without a bound.

    Averages are the exception. An average has a bound if a backend may get another result because it multiplies by a
    rounded 1 / k instead of dividing by k.

    Args:
        name: Name of the operands, for the message.
        axes: Number of ranks on each reduced axis; their product is k.

    Raises:
        InexactData: a reduction of some operands may be rounded.
    """
    if op in ("max", "min"):
        chosen = operands.amax(0) if op == "max" else operands.amin(0)
        return Reduced(chosen.double(), chosen, None, f"equal: the {op} of {len(operands)} operands is one of them")
    if op == "product":
        return _multiply(name, operands)
    accumulate = arithmetic_of(_name_of(operands)).accumulate
    if op == "avg" and not all(reciprocal_is_near(num_ranks, accumulate) for num_ranks in axes):
        return bound_reduction(operands, op, len(axes))
    return _add(name, operands, op)


def join_bits(op: str, operands: torch.Tensor) -> torch.Tensor:
    joined: torch.Tensor = functools.reduce(BITWISE[op], operands)
    return joined


def _name_of(operands: torch.Tensor) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == operands.dtype)


def _add(name: str, operands: torch.Tensor, op: str) -> Reduced:
    num_operands, shape = len(operands), operands.shape[1:]
    flat = find_integers(name, operands.reshape(num_operands, math.prod(shape)))
    odd = num_operands // (num_operands & -num_operands)
    if op == "avg" and bool((flat.integers % odd != 0).any()):
        raise InexactData(f"{name}: operands are no multiples of {odd}, so their average is rounded")
    total = sum_terms(name, flat, operands.dtype)
    value = total.value.reshape(shape) / (num_operands if op == "avg" else 1)
    derivation = f"equal: the {op} of {num_operands} integers times a power of two, exact in any order"
    return Reduced(value, value.to(operands.dtype), None, derivation, total.bits_used)


def _multiply(name: str, operands: torch.Tensor) -> Reduced:
    fractions, exponents = torch.frexp(operands.double())
    most = largest_of((exponents - 1).abs().sum(0))
    if bool((fractions.abs() != 0.5).any()) or 2.0**-most < torch.finfo(operands.dtype).tiny:
        raise InexactData(f"{name}: factors are no powers of two, or their product may be as small as 2**-{most}")
    value = operands.double().prod(0)
    derivation = f"equal: the product of {len(operands)} powers of two, exact in any order"
    return Reduced(value, value.to(operands.dtype), None, derivation)


def bound_reduction(operands: torch.Tensor, op: str, num_axes: int) -> Reduced:
    """Bounds the sum or average of real operands (k, *shape). A backend reduces them axis by axis of the mesh."""
    arithmetic, num_operands = arithmetic_of(_name_of(operands)), len(operands)
    divisor, num_divisions = (num_operands, 2 * num_axes) if op == "avg" else (1, 0)
    value, magnitude = operands.double().sum(0) / divisor, operands.double().abs().sum(0) / divisor
    relative = growth((num_operands - 1, arithmetic.u_r), (num_divisions, arithmetic.u_o))
    num_additions = num_operands - 1
    error = relative * magnitude + num_divisions * num_operands * arithmetic.eta + num_additions * arithmetic.eta_r
    error = where_finite(magnitude * divisor + error, arithmetic.largest, error)
    divided = f", and {num_divisions} of {arithmetic.dtype} to divide" if num_divisions else ""
    derivation = f"{num_operands - 1} roundings of {arithmetic.reduce} of the operands' magnitudes{divided}"
    bound = bounded(value, error, magnitude, num_operands, derivation)
    is_symmetric = arithmetic.rounds_to_nearest and (op == "sum" or num_operands & (num_operands - 1) == 0)
    return Reduced(bound.value, None, bound.allowed, bound.derivation, is_symmetric=is_symmetric)
