"""Bounds of relu, gelu (erf) and silu, forward and backward, element by element.

Letters: x the pre-activation, g the cotangent, u the unit roundoff of accumulation, f the error of
erf and exp in ulp; one ulp is at most 2 u, relative.  E_x and E_g are the errors of x and g.

Derived here from the textbook forms; kernels may reorder the factors.  Every constant is rounded
up, so that a form with one more multiplication stays within the bound.

Source: torch/aten/src/ATen/native/cpu/Activation.cpp (2.13.0) for the forms; Higham, Accuracy and
Stability of Numerical Algorithms, 2nd ed., section 2.2, for the model.
"""

from __future__ import annotations

import math

import torch

from equivtest.oracle.rounding import Arithmetic, Bounded, Operand, bounded, error_of, store, value_of


def relu(x: Operand, arithmetic: Arithmetic) -> Bounded:
    return Bounded(value_of(x).relu(), error_of(x).clone(), "equal: relu computes nothing")


def relu_grad(x: Operand, cotangent: Operand, arithmetic: Arithmetic) -> Bounded:
    """Returns the cotangent where x > 0, and 0 elsewhere. If the error of x hides its sign, the bound allows both."""
    value, error = value_of(x), error_of(x)
    g, e_g = value_of(cotangent), error_of(cotangent)
    passed = value > 0
    unclear = (value.abs() <= error) & (error > 0)
    allowed = torch.where(unclear, g.abs() + e_g, torch.where(passed, e_g, 0.0))
    return Bounded(torch.where(passed, g, 0.0), allowed, "equal: relu's gradient is a copy or zero")


def gelu(x: Operand, arithmetic: Arithmetic) -> Bounded:
    """Computes x (1 + erf(x / sqrt 2)) / 2.

    Derived here, with the module's letters. 1 + erf cancels for x < 0, so the derivation adds absolute errors: 2 f u
    from erf, u from erf's argument z (2 roundings, and |z erf'(z)| < 1/2) and 2 u from the addition. Two products
    follow, and each rounds by at most 2 u. The sum of these errors, multiplied by |x| / 2, is below (2 f + 4) u |x|. An
    error of x is multiplied by |gelu'| < 1.13.
    """
    value, error = value_of(x), error_of(x)
    right = value * torch.special.ndtr(value)
    bound = (2 * arithmetic.libm_ulp + 4) * arithmetic.u_a * value.abs() + 1.13 * error
    bound = store(right, bound, arithmetic)
    derivation = f"(2 x {arithmetic.libm_ulp:g} ulp + 4) roundings of {arithmetic.accumulate} |x|{_one(arithmetic)}"
    return bounded(right, bound, value.abs(), 1, derivation)


def gelu_grad(x: Operand, cotangent: Operand, arithmetic: Arithmetic) -> Bounded:
    """Computes g (Phi(x) + x phi(x)), with Phi and phi the normal distribution and its density.

    Derived here, with the module's letters. The error of Phi is derived as in `gelu`. The exponent -x**2 / 2 is off by
    x**2 u, so phi has a relative error of (x**2 + 2 f + 3) u. The sum and the product with g round once each. An error
    of x is multiplied by |gelu''| < 0.8, and an error of g is multiplied by |gelu'| < 1.13.
    """
    value, e_x = value_of(x), error_of(x)
    g, e_g = value_of(cotangent), error_of(cotangent)
    density = torch.exp(-0.5 * value**2) / math.sqrt(2 * math.pi)
    right = g * (torch.special.ndtr(value) + value * density)
    spread = 1 + 2 * value.abs() * (1 + value**2) * density
    bound = (4 * arithmetic.libm_ulp + 8) * arithmetic.u_a * spread * (g.abs() + e_g)
    bound = bound + 0.8 * e_x * (g.abs() + e_g) + 1.13 * e_g
    bound = store(right, bound, arithmetic)
    derivation = (
        f"(4 x {arithmetic.libm_ulp:g} ulp + 8) roundings of {arithmetic.accumulate} |g|(1 + 2|x|(1 + x^2) phi)"
        f"{_one(arithmetic)}"
    )
    return bounded(right, bound, spread * g.abs(), 1, derivation)


def silu(x: Operand, arithmetic: Arithmetic) -> Bounded:
    """Computes x / (1 + exp(-x)).

    Derived here, with the module's letters. All errors are relative. The error of exp is 2 f u, plus |x| u because the
    argument of exp is rounded. The addition and the quotient add u each. If exp(-x) overflows, the computed quotient is
    0, which is off by at most |x| divided by the largest number. An error of x is multiplied by |silu'| < 1.1.
    """
    value, error = value_of(x), error_of(x)
    right = value * torch.sigmoid(value)
    bound = (2 * arithmetic.libm_ulp + 4 + value.abs()) * arithmetic.u_a * right.abs() + 1.1 * error
    bound = store(right, bound + 2 * value.abs() / arithmetic.largest_a + arithmetic.eta_a, arithmetic)
    derivation = (
        f"(2 x {arithmetic.libm_ulp:g} ulp + 4 + |x|) roundings of {arithmetic.accumulate} |y|{_one(arithmetic)}"
    )
    return bounded(right, bound, (1 + value.abs()) * right.abs(), 1, derivation)


def silu_grad(x: Operand, cotangent: Operand, arithmetic: Arithmetic) -> Bounded:
    """Computes g s (1 + x (1 - s)), with s = 1 / (1 + exp(-x)).

    Derived here, with the module's letters. s has a relative error of (2 f + 2 + |x|) u, so 1 - s has an absolute error
    of (2 f + 2 + |x|) u s. Five more operations round once each. If exp(-x) overflows, s is 0. An error of x is
    multiplied by |silu''| <= 0.5, and an error of g is multiplied by |silu'| < 1.1.
    """
    value, e_x = value_of(x), error_of(x)
    g, e_g = value_of(cotangent), error_of(cotangent)
    s, rest, size = torch.sigmoid(value), torch.sigmoid(-value), value.abs()
    right = g * s * (1 + value * rest)
    f = arithmetic.libm_ulp
    spread = (4 * f + 8 + size) * s * (1 + size * rest) + 2 * (2 * f + 4 + size) * s * size
    magnitude = g.abs() + e_g
    bound = arithmetic.u_a * spread * magnitude + 0.5 * e_x * magnitude + 1.1 * e_g
    bound = bound + 2 * magnitude * (1 + size) / arithmetic.largest_a + arithmetic.eta_a * (1 + magnitude)
    bound = store(right, bound, arithmetic)
    derivation = (
        f"(4 x {f:g} ulp + 8 + |x|) roundings of {arithmetic.accumulate} |g| s (1 + |x|(1 - s)){_one(arithmetic)}"
    )
    return bounded(right, bound, spread * g.abs(), 1, derivation)


def _one(arithmetic: Arithmetic) -> str:
    return f" + 1 of {arithmetic.dtype}"
