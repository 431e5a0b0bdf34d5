"""How far floating point may be from the right value: the arithmetic of a backend, and its roundings.

Every bound here holds for each element by itself and for any order of summation; none is a
tolerance.  Where a correct kernel is found beyond one, a rounding was forgotten: find it, name it,
count it.

Model: a rounding turns v into v (1 + d) + h with |d| <= u and |h| <= eta, where only one of the two
is needed; n roundings in a row turn v into v (1 + t) with |t| <= gamma(n, u).

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
SLACK_TERMS = 16  # operations of a bound's own evaluation that a float64 reference is forgiven, on top of its terms


@dataclass(frozen=True)
class Arithmetic:
    """How a backend computes with tensors of one dtype: what it must declare.

    Attributes:
        dtype: Name of the dtype in which tensors are stored.
        accumulate: Name of the dtype in which kernels compute and sum, at least.
        reduce: Name of the dtype to which a collective rounds after each addition.
        libm_ulp: Largest error of erf, exp, sqrt and the like, in units in the last place.
        rounds_to_nearest: Whether every rounding is to nearest, so that errors have no preferred sign.
        flushes_subnormals: Whether results below the smallest normal number become zero: +0.0, or that of
            the result's sign; those of an addition of zero too.
        adds_rows_in_order: Whether a kernel that adds rows into the rows of a table, such as the
            gradient of an embedding, adds them one after the other in the order given, be they
            wide or narrow, so that each element has one value.
        order_varies: Whether a collective may add in another order in each call, the same on all ranks.
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
        """Unit roundoff of a collective's additions.

        Where they have more bits than the dtype, its result is rounded once more to be stored, which each of them may
        be taken to be.
        """
        added = unit_roundoff(self.reduce)
        return added if added >= self.u_o else added + self.u_o + added * self.u_o

    @property
    def eta(self) -> float:
        """Largest error of storing a result that underflows."""
        return underflow(self.dtype, flushed=self.flushes_subnormals)

    @property
    def eta_a(self) -> float:
        """Largest error of an accumulator's product that underflows."""
        return underflow(self.accumulate, flushed=self.flushes_subnormals)

    @property
    def eta_r(self) -> float:
        """Largest error of an addition whose result is subnormal: none, unless that is flushed."""
        return self.eta if self.flushes_subnormals else 0.0

    @property
    def largest(self) -> float:
        """Largest magnitude that can be stored."""
        return float(torch.finfo(DTYPES[self.dtype]).max)

    @property
    def largest_a(self) -> float:
        """Largest magnitude that an accumulator holds."""
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
    """A tensor known to within a bound.

    Attributes:
        value: The right value, float64.
        allowed: Largest absolute error of a correct result per element, float64; infinite where
            overflow is possible, so that nothing can be said.
        derivation: Why `allowed` is what it is, for a message.
    """

    value: torch.Tensor
    allowed: torch.Tensor
    derivation: str = ""


Operand: TypeAlias = torch.Tensor | Bounded
"""What goes into a computation: a tensor whose bits are known, or one that is itself off by a bound."""


@functools.cache
def unit_roundoff(dtype: str) -> float:
    """Half the distance from 1 to the next value: 2**-24 for float32."""
    return float(torch.finfo(DTYPES[dtype]).eps) / 2


@functools.cache
def underflow(dtype: str, *, flushed: bool = False) -> float:
    """Half the smallest subnormal number; the smallest normal one where subnormals are flushed to zero."""
    finfo = torch.finfo(DTYPES[dtype])
    if flushed or dtype == "float64":  # half of float64's smallest subnormal is no float64 number
        return float(finfo.tiny if flushed else finfo.smallest_normal * finfo.eps)
    return float(finfo.smallest_normal * finfo.eps) / 2


def gamma(num_roundings: int, u: float) -> float:
    """n u / (1 - n u): what n roundings in a row come to at most, relative; infinite from n u = 1 on.

    Source: Higham, lemma 3.1.
    """
    product = num_roundings * u
    return product / (1 - product) if product < 1 else math.inf


def growth(*roundings: tuple[int, float]) -> float:
    """prod (1 + u)**n - 1 over pairs (n, u), without cancellation: roundings of several precisions in a row."""
    return math.expm1(sum(count * math.log1p(u) for count, u in roundings))


def value_of(operand: Operand) -> torch.Tensor:
    """The operand's value, float64."""
    return (operand.value if isinstance(operand, Bounded) else operand).to(torch.float64)


def error_of(operand: Operand) -> torch.Tensor:
    """The operand's error bound, float64; zeros for a plain tensor."""
    return operand.allowed if isinstance(operand, Bounded) else torch.zeros(operand.shape, dtype=torch.float64)


def store(value: torch.Tensor, error: torch.Tensor, arithmetic: Arithmetic, *, times: int = 1) -> torch.Tensor:
    """The error after storing a result that is `error` off `value`, each storage one rounding; float64.

    Infinite where the result may overflow; none where it is certainly zero.  A bool times a number would be
    float32, in which what float32 and float64 lose by underflow is zero.
    """
    size = value.abs() + error
    stored = error + growth((times, arithmetic.u_o)) * size + times * arithmetic.eta * (size != 0).double()
    return where_finite(value.abs() + stored, arithmetic.largest, stored)


def where_finite(magnitude: torch.Tensor, largest: float, error: torch.Tensor) -> torch.Tensor:
    """`error`, but infinite wherever `magnitude` may pass `largest` or is NaN."""
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
    """The error of a sum once `num_additions` additions in any order have each rounded their result.

    Derived here.  What an addition gives is the sum of some of the terms: at most that of the
    positive or that of the negative ones, which is (magnitude + |total|) / 2 =: M, and `beside`.
    It is that far from zero but for the errors below it, which are no more than the final error E.
    So E <= error + n u (M + E), hence E <= error + gamma(n, u) (M + error).

    Args:
        total, magnitude: Of the exact terms, their sum and that of their magnitudes.
        error: What the terms as they are added are off by, all together.
        beside: Of further terms, such as shares of a bias, the magnitudes.
    """
    return error + gamma(num_additions, u) * ((magnitude + total.abs()) / 2 + beside + error)


def bounded(
    value: torch.Tensor, error: torch.Tensor, magnitude: torch.Tensor, num_terms: int, derivation: str
) -> Bounded:
    """A result whose reference was computed in float64, which rounds as well.

    Args:
        error: Bound of a correct result's distance from the exact value.
        magnitude: Sum of magnitudes behind each element of the reference.
        num_terms: How many terms that sum has.

    Source: Higham, equation 3.5, for the reference's own error.
    """
    allowed = error + (num_terms + SLACK_TERMS) * U_REFERENCE * magnitude
    return Bounded(value, torch.nan_to_num(allowed, nan=math.inf, posinf=math.inf), derivation)
