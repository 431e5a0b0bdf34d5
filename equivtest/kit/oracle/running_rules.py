"""What each operation makes of the distances that come in, and what its own roundings add.

Letters: v the value of the unsharded module, e how far a correct program's may be from it, m the magnitude of its
shares (`equivtest.kit.oracle.ranged`); n how many terms a sum has; own(m, n) what n roundings beside a few spare ones
make of m, once in the program and once in the unsharded module (`equivtest.kit.oracle.running_roundings`).

    a product              e = e_a (|v_b| + e_b) + |v_a| e_b,  m = m_a m_b,  and own(m, n) where it is summed
    a sum                  e = sum of e,  m = sum of m,  and own(m, n)
    f that rises or falls  e = the larger of |f(v + e) - f(v)| and |f(v - e) - f(v)|,  and own(|f| + e)
    a maximum, a relu      e of the operands, as no maximum moves further than they do

Derived here: a program of any order of summation, on any ranks, rounds each partial result once, and each is a sum of
some terms or shares, so at most m.  What is not linear takes the sum of all shares, so that m begins anew there.

Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., sections 3.1 and 3.3 (running error analysis).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from equivtest.kit.oracle.ranged import Parts
from equivtest.kit.oracle.running_roundings import Roundings, chosen

Rule = Callable[..., Parts]
Curve = Callable[[torch.Tensor], torch.Tensor]


def add(r: Roundings, left: Any, right: Any, *, alpha: float = 1) -> Parts:
    """Of a term that all ranks hold each may add its part to its share of the other; infinite where a term is."""
    a, b = Parts.of(left), Parts.of(right)
    value = torch.add(_plain(left), _plain(right), alpha=alpha)
    magnitude = a.magnitude + abs(alpha) * b.magnitude
    found = r.rounded(value, a.error + abs(alpha) * b.error, magnitude, r.of_sum(0))
    masked = value.isinf() & ((a.value.isinf() & (a.error == 0)) | (b.value.isinf() & (b.error == 0)))
    return found._replace(error=torch.where(masked, 0.0, found.error))


def sub(r: Roundings, left: Any, right: Any, *, alpha: float = 1) -> Parts:
    return add(r, left, right, alpha=-alpha)


def rsub(r: Roundings, left: Any, right: Any, *, alpha: float = 1) -> Parts:
    return add(r, right, left, alpha=-alpha)


def mul(r: Roundings, left: Any, right: Any) -> Parts:
    a, b = Parts.of(left), Parts.of(right)
    error = _times(a.error, b.reach) + _times(b.error, a.size)
    return r.rounded(torch.mul(_plain(left), _plain(right)), error, a.magnitude * b.magnitude)


def matmul(r: Roundings, left: Any, right: Any) -> Parts:
    """mm, bmm, mv, dot: over the last dim of the left one."""
    a, b = Parts.of(left), Parts.of(right)
    error = torch.matmul(a.error, b.reach) + torch.matmul(a.size, b.error)
    value, magnitude = torch.matmul(_plain(left), _plain(right)), torch.matmul(a.magnitude, b.magnitude)
    return r.rounded(value, error, magnitude, r.of_sum(left.shape[-1]))


def _times(error: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Nothing where nothing is off, of infinity too."""
    return torch.where(error == 0, 0.0, error * size)


def addmm(r: Roundings, plus: Any, left: Any, right: Any, *, beta: float = 1, alpha: float = 1) -> Parts:
    """And baddbmm, addmv."""
    product = matmul(r, left, right).wrapped()
    if alpha != 1:
        product = mul(r, product, alpha).wrapped()
    return add(r, plus if beta == 1 else mul(r, plus, beta).wrapped(), product)


def div(r: Roundings, left: Any, right: Any) -> Parts:
    """The divisor's shares are added before."""
    a, b = Parts.of(left), Parts.of(right)
    least = b.size - b.error
    value = torch.div(_plain(left), _plain(right))
    error = (a.error + _times(b.error, value.double().abs())) / least
    sure = (least > 0).expand(value.shape)
    return r.rounded(value, torch.where(sure, error, math.inf), torch.where(sure, a.magnitude / least, math.inf))


def larger(r: Roundings, left: Any, right: Any) -> Parts:
    a, b = Parts.of(left), Parts.of(right)
    return chosen(torch.maximum(a.value, b.value), torch.maximum(a.error, b.error))


def smaller(r: Roundings, left: Any, right: Any) -> Parts:
    a, b = Parts.of(left), Parts.of(right)
    return chosen(torch.minimum(a.value, b.value), torch.maximum(a.error, b.error))


def relu(r: Roundings, operand: Any) -> Parts:
    a = Parts.of(operand)
    return chosen(a.value.relu(), torch.where(a.value < -a.error, 0.0, a.error))


def absolute(r: Roundings, operand: Any) -> Parts:
    a = Parts.of(operand)
    return chosen(a.value.abs(), a.error)


def sign(r: Roundings, operand: Any) -> Parts:
    a = Parts.of(operand)
    return chosen(a.value.sign(), torch.where((a.size <= a.error) & (a.error > 0), 2.0, 0.0))


def threshold_backward(r: Roundings, cotangent: Any, operand: Any, threshold: float) -> Parts:
    """The cotangent where the operand is larger; where that is not certain, either it or zero."""
    g, a = Parts.of(cotangent), Parts.of(operand)
    passes = a.value > threshold
    unclear = ((a.value.double() - threshold).abs() <= a.error) & (a.error > 0)
    error = torch.where(unclear, g.reach, torch.where(passes, g.error, 0.0))
    return Parts(torch.where(passes, g.value, 0.0), error, torch.where(passes | unclear, g.magnitude, 0.0))


def where(r: Roundings, condition: torch.Tensor, left: Any, right: Any) -> Parts:
    a, b = Parts.of(left), Parts.of(right)
    value = torch.where(condition, _plain(left), _plain(right))
    return Parts(value, torch.where(condition, a.error, b.error), torch.where(condition, a.magnitude, b.magnitude))


def power(r: Roundings, operand: Any, exponent: Any) -> Parts:
    """Of a number: |(v + d)**n - v**n| is at most (|v| + e)**n - |v|**n for n = 1, 2, 3, ..."""
    a, n = Parts.of(operand), float(exponent)
    if n >= 1 and n.is_integer():
        return r.rounded(a.value**exponent, a.reach**n - a.size**n, a.reach**n, int(n))
    if n == 0:
        return chosen(a.value**exponent, torch.zeros_like(a.error))
    if n <= -1 and n.is_integer():
        return div(r, 1, power(r, operand, -exponent).wrapped())
    return curve(r, operand, lambda x: x**exponent, above=0.0)


def curve(r: Roundings, operand: Any, f: Curve, *, above: float = -math.inf) -> Parts:
    """f, which rises or falls all the way where it is defined, for x > above."""
    a = Parts.of(operand)
    right, low, high = a.value.double(), a.value - a.error, a.value + a.error
    error = torch.maximum((f(high) - f(right)).abs(), (f(low) - f(right)).abs())
    error = torch.where(a.error == 0, 0.0, torch.where(low > above, error, math.inf))
    value = f(a.value)
    return r.rounded(value, error, value.double().abs() + error, r.of_curve)


def sigmoid(r: Roundings, operand: Any) -> Parts:
    """1 / (1 + exp(-x)), off by |x| roundings where x was rounded before, and zero where the exponential overflows."""
    a = Parts.of(operand)
    found = curve(r, operand, torch.sigmoid)
    return r.rounded(found.value, found.error + 2 / r.arithmetic.largest_a, found.magnitude * (1 + a.size))


def wave(r: Roundings, operand: Any, f: Curve) -> Parts:
    """sin and cos: no steeper than 1."""
    a = Parts.of(operand)
    value = f(a.value)
    return r.rounded(value, a.error.clamp(max=2.0), value.double().abs() + 1, r.of_curve)


def _plain(operand: Any) -> Any:
    """The value as the module computes with it: numbers stay numbers, which decide no dtype."""
    return Parts.of(operand).value if isinstance(operand, torch.Tensor) else operand


def _curve(f: Curve, above: float = -math.inf) -> Rule:
    return lambda r, operand: curve(r, operand, f, above=above)


def _wave(f: Curve) -> Rule:
    return lambda r, operand: wave(r, operand, f)


RULES: dict[str, Rule] = {
    "add": add, "sub": sub, "rsub": rsub, "mul": mul, "div": div, "neg": lambda r, x: mul(r, x, -1),
    "mm": matmul, "bmm": matmul, "mv": matmul, "dot": matmul, "addmm": addmm, "baddbmm": addmm, "addmv": addmm,
    "maximum": larger, "minimum": smaller, "relu": relu, "threshold_backward": threshold_backward, "where": where,
    "abs": absolute, "sign": sign, "sgn": sign, "exp": _curve(torch.exp), "log": _curve(torch.log, 0.0),
    "sqrt": _curve(torch.sqrt, 0.0), "rsqrt": _curve(torch.rsqrt, 0.0), "erf": _curve(torch.erf),
    "tanh": _curve(torch.tanh), "sigmoid": sigmoid, "expm1": _curve(torch.expm1), "log1p": _curve(torch.log1p, -1.0),
    "sin": _wave(torch.sin), "cos": _wave(torch.cos), "pow": power, "reciprocal": lambda r, x: div(r, 1, x),
    "square": lambda r, x: mul(r, x, x), "exp2": _curve(torch.exp2), "log2": _curve(torch.log2, 0.0),
    "log10": _curve(torch.log10, 0.0), "sinh": _curve(torch.sinh), "asinh": _curve(torch.asinh),
    "atan": _curve(torch.atan), "erfc": _curve(torch.erfc),
}  # fmt: skip
"""By operator, called with its operands in order."""
