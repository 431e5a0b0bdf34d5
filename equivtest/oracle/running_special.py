"""Rules of special functions, of products of many factors and of triangular systems: see `running_rules`.

A monotonic function of one operand is bounded by `equivtest.oracle.running_rules.curve`.  If a function has a minimum
that an inexact operand may reach, the distance from the value to the minimum is added to the bound.  If the slope of a
function has a bound, the slope bounds the error.  A further operand, such as the order of a gamma function, must be
exact, or no bound is known.

Source: DLMF 5.4 (the minimum of gamma), 8.2, 10.25; for triangular systems Higham, Accuracy and Stability of Numerical
Algorithms, 2nd ed., theorem 8.5: for any order of substitution, (T + D) x = b, with |D| at most gamma_n |T|.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from equivtest.oracle.ranged import Parts
from equivtest.oracle.running_roundings import Roundings, chosen, gamma_of
from equivtest.oracle.running_rules import Curve, Rule, all_exact, curve

MINIMUM_OF_GAMMA = 1.4616321449683623


def _curve(f: Curve, above: float = -math.inf) -> Rule:
    """Makes the rule of a monotonic function whose kernel may have an absolute error of a few roundings of 1.

    Near a zero of the function, such an error is much larger than the roundings of the value itself.
    """

    def rule(r: Roundings, operand: Any) -> Parts:
        found = curve(r, operand, f, above=above)
        return r.rounded(found.value, found.error, found.magnitude + 1, r.of_curve)

    return rule


def _valley(f: Curve, floor: float, above: float = -math.inf) -> Rule:
    """Makes the rule of a function that falls until `floor` and rises from `floor` on."""

    def rule(r: Roundings, operand: Any) -> Parts:
        a = Parts.of(operand)
        found = curve(r, operand, f, above=above)
        low = f(torch.tensor(floor, dtype=torch.float64))
        is_inside = (a.value - a.error < floor) & (a.value + a.error > floor)
        error = torch.where(is_inside, (found.value.double() - low).abs(), 0.0)
        return r.rounded(found.value, found.error + error, found.magnitude + 1, r.of_curve)

    return rule


def _no_steeper(f: Curve, slope: float) -> Rule:
    def rule(r: Roundings, operand: Any) -> Parts:
        a = Parts.of(operand)
        value = f(a.value)
        return r.rounded(value, slope * a.error, value.double().abs() + slope * a.error + 1, r.of_curve)

    return rule


def tangent(r: Roundings, operand: Any) -> Parts:
    """Computes tan, which rises between its poles. Beyond -pi/2 to pi/2, an inexact operand has no bound."""
    a = Parts.of(operand)
    found = _curve(torch.tan)(r, operand)
    is_between = a.reach < math.pi / 2
    return found._replace(error=torch.where(is_between | (a.error == 0), found.error, math.inf))


def hypotenuse(r: Roundings, left: Any, right: Any) -> Parts:
    """Computes hypot, whose error is at most the sum of its operands' errors.

    A kernel squares, adds and takes the root, or scales the operands first.
    """
    a, b = Parts.of(left), Parts.of(right)
    value, error = torch.hypot(a.value, b.value), a.error + b.error
    return r.rounded(value, error, value.double().abs() + error, r.of_curve + 4)


def angle(r: Roundings, left: Any, right: Any) -> Parts:
    """Computes atan2, the angle of the point (right, left).

    If the point is off by at most e, and at least d from the origin, the angle is off by at most (pi / 2) e / d.  There
    is no bound if d is zero, or if the point may cross the cut along the negative x-axis.
    """
    a, b = Parts.of(left), Parts.of(right)
    value, off = torch.atan2(a.value, b.value), a.error + b.error
    least = torch.hypot(a.value.double(), b.value.double()) - off
    is_sure = (least > 0) & ((b.value - b.error > 0) | (a.size > a.error))
    error = torch.where(off == 0, 0.0, torch.where(is_sure, math.pi / 2 * off / least, math.inf))
    return r.rounded(value, error, value.double().abs() + error, r.of_curve)


def _beside(f: Any) -> Rule:
    """Makes the rule of f(a, x), which is monotonic in x. If a has an error, no bound is known."""

    def rule(r: Roundings, first: Any, operand: Any) -> Parts:
        a, x = Parts.of(first), Parts.of(operand)
        plain = a.value + torch.zeros_like(x.value)
        low, high = (f(plain.double(), x.value.double() + sign * x.error) for sign in (-1, 1))
        right, value = f(plain.double(), x.value.double()), f(a.value, x.value)
        off = torch.maximum((low - right).abs(), (high - right).abs())
        error = torch.where((a.error == 0) & (x.error == 0), 0.0, torch.where(a.error == 0, off, math.inf))
        error = error.nan_to_num(nan=math.inf)
        return r.rounded(value, error, value.double().abs() + error + 1, 4 * r.of_curve)

    return rule


def polygamma(r: Roundings, order: int, operand: Any) -> Parts:
    """Computes polygamma, which is monotonic above zero for each order."""
    return _curve(lambda x: torch.polygamma(order, x), 0.0)(r, operand)


def _exact_alone(f: Any) -> Rule:
    def rule(r: Roundings, left: Any, right: Any) -> Parts:
        operands = [Parts.of(each).value if isinstance(each, torch.Tensor) else each for each in (left, right)]
        value = f(*operands)
        is_exact = all_exact((left, right)).expand(value.shape)
        return chosen(value, torch.where(is_exact, 0.0, math.inf))

    return rule


def scaled(r: Roundings, left: Any, right: torch.Tensor) -> Parts:
    """Computes ldexp, a product with a power of two, which rounds only if it underflows."""
    a = Parts.of(left)
    return Parts(torch.ldexp(a.value, right), *(torch.ldexp(part, right) for part in (a.error, a.magnitude)))


def product(r: Roundings, operand: Any, dim: int | None = None, keepdim: bool = False) -> Parts:  # noqa: FBT001, FBT002
    """Multiplies the elements along a dim. The error of the product is prod(|v| + e) - prod |v|."""
    a = Parts.of(operand)
    how: tuple[Any, ...] = () if dim is None else (dim, keepdim)
    num = a.value.numel() if dim is None else a.value.shape[dim] if a.value.dim() else 1
    reach = a.reach.prod(*how)
    return r.rounded(a.value.prod(*how), reach - a.size.prod(*how), reach, num, stores=max(num, 1))


def products(r: Roundings, operand: Any, dim: int) -> Parts:
    """Computes cumprod, whose k-th element is the product of the first k factors."""
    a = Parts.of(operand)
    reach = a.reach.cumprod(dim)
    num = a.value.shape[dim] if a.value.dim() else 1
    return r.rounded(a.value.cumprod(dim), reach - a.size.cumprod(dim), reach, num, stores=max(num, 1))


def log_sums(r: Roundings, operand: Any, dim: int) -> Parts:
    """Computes logcumsumexp, which is log(exp(x_1) + ... + exp(x_k)) for each k. No term's error grows.

    Derived here: the k-th result is y + log1p(exp(x - y)), with x the k-th term and y the result before it. A kernel
    may exchange x and y. The difference x - y is off by at most one rounding of |x| + |y|. The slope of exp up to zero,
    and of log1p from zero on, is at most 1.
    """
    a = Parts.of(operand)
    if not a.value.dim() or not a.value.numel():
        return chosen(torch.logcumsumexp(a.value, dim), a.error)
    value = torch.logcumsumexp(a.value, dim)
    size = a.size.cummax(dim).values + value.double().abs().cummax(dim).values + 1
    num = a.value.shape[dim] * (2 * r.of_curve + 4)
    return r.rounded(value, a.error.cummax(dim).values, size, num)


def solved(
    r: Roundings,
    matrix: Any,
    columns: Any,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Parts:
    """Solves T x = b for a triangular T of n rows.

    Derived here from theorem 8.5: the error of x is at most p + M K p + (M K)**2 p + ..., with p = M (F + K |x|). M is
    the absolute value of T's inverse, and F is the error of b. K is the error of T plus gamma_n |T|, once for the
    program and once for the unsharded module.
    """
    a, b = Parts.of(matrix), Parts.of(columns)
    value = torch.linalg.solve_triangular(a.value, b.value, upper=upper, left=left, unitriangular=unitriangular)
    part = torch.triu if upper else torch.tril
    t, off = part(a.value.double()), part(a.error)
    if unitriangular:
        t.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        off.diagonal(dim1=-2, dim2=-1).fill_(0.0)
    x, f = value.double().abs(), b.error
    if not left:
        t, off, x, f, upper = t.mT, off.mT, x.mT, f.mT, not upper
    size = t.shape[-1]
    identity = torch.eye(size, dtype=torch.float64).expand(t.shape)
    inverse = torch.linalg.solve_triangular(t, identity, upper=upper).abs()
    share = 2 * gamma_of(2 * size + 3, r.record(value.dtype).u_o)
    k = off + share * (t.abs() + off)
    again = inverse @ k
    error = inverse @ (f + share * (f + t.abs() @ x) + k @ x)
    if size and not bool((again.sum(-1) < 0.5).all()):
        error = torch.full_like(error, math.inf)
    error = 2 * error  # 1 + p + p**2 + ... for p of at most a half
    error = (error if left else error.mT) + (r.ranks + 1) * size * r.record(value.dtype).eta
    return chosen(value, error.nan_to_num(nan=math.inf))


RULES: dict[str, Any] = {
    "asin": _curve(torch.asin), "acos": _curve(torch.acos), "atanh": _curve(torch.atanh),
    "erfinv": _curve(torch.erfinv), "acosh": _curve(torch.acosh, 1.0), "digamma": _curve(torch.digamma, 0.0),
    "special_i1": _curve(torch.special.i1),
    "special_erfcx": _curve(torch.special.erfcx), "special_ndtri": _curve(torch.special.ndtri),
    "special_log_ndtr": _curve(torch.special.log_ndtr), "cosh": _valley(torch.cosh, 0.0), "i0": _valley(torch.i0, 0.0),
    "lgamma": _valley(torch.lgamma, MINIMUM_OF_GAMMA, 0.0), "special_i0e": _no_steeper(torch.special.i0e, 0.5),
    "special_i1e": _no_steeper(torch.special.i1e, 0.5), "tan": tangent, "hypot": hypotenuse, "atan2": angle,
    "igamma": _beside(torch.igamma), "igammac": _beside(torch.igammac), "special_zeta": _beside(torch.special.zeta),
    "polygamma": polygamma, "fmod": _exact_alone(torch.fmod), "remainder": _exact_alone(torch.remainder),
    "ldexp": scaled, "prod": product, "cumprod": products, "logcumsumexp": log_sums,
    "linalg_solve_triangular": solved,
}  # fmt: skip
"""Operator -> rule, called with `Roundings` and the operator's own arguments."""


def triangular_solve(b: Any, a: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False) -> Any:  # noqa: FBT001, FBT002
    """Solves a triangular system like torch.triangular_solve. Also returns a copy of the matrix."""
    matrix = a.mT if transpose else a
    found = torch.linalg.solve_triangular(matrix, b, upper=upper != transpose, unitriangular=unitriangular)
    return found, a.clone()


def cholesky_solve(b: Any, factor: Any, upper: bool = False) -> Any:  # noqa: FBT001, FBT002
    """Solves two triangular systems, one for each factor of the matrix, as LAPACK's xPOTRS does."""
    first, second = (factor.mT, factor) if upper else (factor, factor.mT)
    half = torch.linalg.solve_triangular(first, b, upper=False)
    return torch.linalg.solve_triangular(second, half, upper=True)


def lu_solve(factors: Any, pivots: torch.Tensor, b: Any, left: bool = True, adjoint: bool = False) -> Any:  # noqa: FBT001, FBT002
    """Orders the rows by the pivots and solves two triangular systems of real numbers, as LAPACK's xGETRS does."""
    if not left:
        return lu_solve(factors, pivots, b.mT, adjoint=not adjoint).mT
    order, lower, upper = torch.lu_unpack(factors, pivots)
    if adjoint:
        half = torch.linalg.solve_triangular(upper.mT, b, upper=False)
        return order @ torch.linalg.solve_triangular(lower.mT, half, upper=True, unitriangular=True)
    half = torch.linalg.solve_triangular(lower, order.mT @ b, upper=False, unitriangular=True)
    return torch.linalg.solve_triangular(upper, half, upper=True)


APART: dict[str, Any] = {
    "triangular_solve": triangular_solve, "cholesky_solve": cholesky_solve, "linalg_lu_solve": lu_solve
}  # fmt: skip
"""Operator -> decomposition into operators that have rules; takes the operator's own arguments."""
