"""Bounds floating-point errors: the arithmetic of a backend, and its roundings.

Every bound here holds for each element separately and for any order of summation; none is a
tolerance.  If a correct kernel exceeds a bound, the bound has forgotten a rounding: find the rounding, name it, count
it.

Model: a rounding turns v into v (1 + d) + h with |d| <= u and |h| <= eta, and d or h is 0. n roundings in a row turn v
into v (1 + t) with |t| <= gamma(n, u).

Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.: equation 2.4 (the model),
2.8 (with underflow), lemma 3.1 (gamma); IEEE 754-2019 table 3.5 for the formats.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TypeAlias

import torch

from equivtest.tensors import DTYPES

U_REFERENCE = 2.0**-53  # unit roundoff of float64, in which references and bounds are computed
SLACK_TERMS = 16  # operations of a bound's own evaluation that a float64 reference may add to its terms


@dataclass(frozen=True)
class Arithmetic:
    """Describes how a backend computes with tensors of one dtype. The backend declares this record.

    Attributes:
        dtype: Name of the dtype in which tensors are stored.
        accumulate: Name of the dtype in which kernels compute and sum; a kernel may use more bits, but not fewer.
        reduce: Name of the dtype to which a collective rounds after each addition.
        libm_ulp: Largest error of erf, exp, sqrt and the like, in units in the last place.
        rounds_to_nearest: True if every rounding is to nearest, so that errors have no preferred sign.
        flushes_subnormals: True if results below the smallest normal number become zero: +0.0, or zero with
            the result's sign.  This includes the sum of such a number and zero.
        adds_rows_in_order: True if a kernel that adds rows into the rows of a table, such as the gradient of an
            embedding, adds the rows one after the other in their order, however wide the rows are. Then only one value
            of each element is right.
        order_varies: True if a collective may add in another order in each call. In one call the order is the same on
            all ranks.
    """

    dtype: str
    accumulate: str
    reduce: str
    libm_ulp: float = 4.0
    rounds_to_nearest: bool = True
    flushes_subnormals: bool = False
    adds_rows_in_order: bool = False
    order_varies: bool = False

    @property
    def u_a(self) -> float:
        """Unit roundoff of accumulation."""
        return unit_roundoff(self.accumulate)

    @property
    def u_o(self) -> float:
        """Unit roundoff of storage."""
        return unit_roundoff(self.dtype)

    @property
    def u_r(self) -> float:
        """Unit roundoff of the additions in a collective.

        If the additions have more bits than the dtype, the result is rounded once more when it is stored. The unit
        roundoff counts this rounding for each addition.
        """
        added = unit_roundoff(self.reduce)
        return added if added >= self.u_o else added + self.u_o + added * self.u_o

    @property
    def eta(self) -> float:
        """Largest error of storing a result that underflows."""
        return underflow(self.dtype, flushed=self.flushes_subnormals)

    @property
    def eta_a(self) -> float:
        """Largest error of a product that underflows in an accumulator."""
        return underflow(self.accumulate, flushed=self.flushes_subnormals)

    @property
    def eta_r(self) -> float:
        """Largest error of an addition whose result is subnormal: 0, unless the backend flushes subnormals."""
        return self.eta if self.flushes_subnormals else 0.0

    @property
    def largest(self) -> float:
        """Largest magnitude that can be stored."""
        return float(torch.finfo(DTYPES[self.dtype]).max)

    @property
    def largest_a(self) -> float:
        """Largest magnitude in an accumulator."""
        return float(torch.finfo(DTYPES[self.accumulate]).max)


TORCH_CPU = {
    "float64": Arithmetic("float64", "float64", "float64", adds_rows_in_order=True),
    "float32": Arithmetic("float32", "float32", "float32", adds_rows_in_order=True),
    "bfloat16": Arithmetic("bfloat16", "float32", "bfloat16", adds_rows_in_order=True),
    "float16": Arithmetic("float16", "float32", "float16", adds_rows_in_order=True),
}
"""torch's CPU kernels and gloo: 16-bit kernels compute in float32 and store once, gloo adds in the tensor's dtype.

Source: at::opmath_type (ATen/OpMathType.h) and at::acc_type of torch 2.13.0; gloo/math.h, sum over
gloo::float16 and c10::BFloat16; embedding_dense_backward_cpu_loop in ATen/native/Embedding.cpp, one token
after the other.  Sleef's functions are within 1 ulp, torch's own vector code within 4.
"""


@dataclass(frozen=True)
class Bounded:
    """A right value together with the largest error that a correct result may have.

    Attributes:
        value: The right value, a float64 tensor.
        allowed: Largest absolute error of a correct result per element, a float64 tensor. The allowed error is infinite
            if overflow is possible, because then nothing is known.
        derivation: Derivation of `allowed` in words, for a message.
    """

    value: torch.Tensor
    allowed: torch.Tensor
    derivation: str = ""


Operand: TypeAlias = torch.Tensor | Bounded
"""An operand: a tensor with known bits, or one with its own error bound."""


@functools.cache
def unit_roundoff(dtype: str) -> float:
    """Returns half the distance from 1 to the next value: 2**-24 for float32."""
    return float(torch.finfo(DTYPES[dtype]).eps) / 2


@functools.cache
def underflow(dtype: str, *, flushed: bool = False) -> float:
    """Returns half the smallest subnormal number, or the smallest normal number if subnormals are flushed to zero."""
    finfo = torch.finfo(DTYPES[dtype])
    if flushed or dtype == "float64":  # half of float64's smallest subnormal is no float64 number
        return float(finfo.tiny if flushed else finfo.smallest_normal * finfo.eps)
    return float(finfo.smallest_normal * finfo.eps) / 2


def gamma(num_roundings: int, u: float) -> float:
    """Returns n u / (1 - n u), the largest relative error of n roundings in a row. Infinite if n u is at least 1.

    Source: Higham, lemma 3.1.
    """
    product = num_roundings * u
    return product / (1 - product) if product < 1 else math.inf


def growth(*roundings: tuple[int, float]) -> float:
    """Returns the relative error of roundings of several precisions in a row: prod (1 + u)**n - 1 over pairs (n, u)."""
    return math.expm1(sum(count * math.log1p(u) for count, u in roundings))


def value_of(operand: Operand) -> torch.Tensor:
    return (operand.value if isinstance(operand, Bounded) else operand).to(torch.float64)


def error_of(operand: Operand) -> torch.Tensor:
    return operand.allowed if isinstance(operand, Bounded) else torch.zeros(operand.shape, dtype=torch.float64)


def store(value: torch.Tensor, error: torch.Tensor, arithmetic: Arithmetic, *, times: int = 1) -> torch.Tensor:
    """Returns a float64 bound on the error of a result that was stored `times` times.

    The bound is infinite if the result may overflow, and 0 if the result is certainly zero.  The code converts the mask
    `size != 0` to float64, because a bool times a number is float32, which cannot represent an underflow of float32 or
    float64.

    Args:
        error: Distance of the result from `value` before it is stored.
    """
    size = value.abs() + error
    stored = error + growth((times, arithmetic.u_o)) * size + times * arithmetic.eta * (size != 0).double()
    return where_finite(value.abs() + stored, arithmetic.largest, stored)


def where_finite(magnitude: torch.Tensor, largest: float, error: torch.Tensor) -> torch.Tensor:
    return torch.where(magnitude <= largest, error, math.inf)


def after_additions(
    total: torch.Tensor,
    magnitude: torch.Tensor,
    error: torch.Tensor,
    num_additions: int,
    u: float,
    *,
    beside: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    """Bounds the error of a sum after `num_additions` additions in any order. Each addition rounds its result.

    Derived here, with n for `num_additions`.  The result of an addition is the sum of some of the terms, so it is
    at most the sum of all positive or of all negative terms.  Let M be this limit: (magnitude + |total|) / 2 + beside.
    The computed result is at most M plus the errors made before, which are no more than the final error E.
    So E <= error + n u (M + E), hence E <= error + gamma(n, u) (M + error).

    Args:
        total, magnitude: Sums of the exact terms and of their magnitudes.
        error: Sum of the errors of the added terms.
        u: Unit roundoff of the additions.
        beside: Sum of the magnitudes of terms that `total` and `magnitude` do not contain, such as shares of a bias.
    """
    return error + gamma(num_additions, u) * ((magnitude + total.abs()) / 2 + beside + error)


def bounded(
    value: torch.Tensor, error: torch.Tensor, magnitude: torch.Tensor, num_terms: int, derivation: str
) -> Bounded:
    """Returns a result with its bound. The bound includes the rounding error of the oracle's own float64 computation.

    Args:
        error: Largest distance of a correct result from the exact value.
        magnitude: Sum of the magnitudes of the terms behind each element of the reference.
        num_terms: Number of terms of that sum.

    Source: Higham, equation 3.5, for the reference's own error.
    """
    allowed = error + (num_terms + SLACK_TERMS) * U_REFERENCE * magnitude
    return Bounded(value, torch.nan_to_num(allowed, nan=math.inf, posinf=math.inf), derivation)
