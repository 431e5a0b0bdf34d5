"""What each operation makes of the distances that come in, and what its own roundings add.

Letters: v the value of the unsharded module, e how far a correct program's may be from it, m the magnitude of its
shares (`equivtest.oracle.ranged`); n how many terms a sum has; own(m, n) what n roundings beside a few spare ones make
of m, once in the program and once in the unsharded module, `Roundings`.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from equivtest.oracle.ranged import Parts
from equivtest.oracle.rounding import U_REFERENCE, Arithmetic, gamma, underflow, where_finite
from equivtest.tensors import dtype_name

Dims = int | Sequence[int] | None
Rule = Callable[..., Parts]
Curve = Callable[[torch.Tensor], torch.Tensor]

SPARE = 3  # roundings of a result beside those of its sum: a kernel may reorder factors, and divide by the ranks


@dataclass(frozen=True)
class Roundings:
    """What an operation itself may add, on so many ranks.

    Attributes:
        ranks: Each rank's share of a sum is stored, and a collective adds them.
    """

    arithmetic: Arithmetic
    ranks: int

    @property
    def u(self) -> float:
        """The largest unit of roundoff of accumulation, storage and collectives."""
        return max(self.arithmetic.u_a, self.arithmetic.u_o, self.arithmetic.u_r)

    @property
    def of_curve(self) -> int:
        """Of exp, erf and the like: an ulp is two units of roundoff at most."""
        return 2 * math.ceil(self.arithmetic.libm_ulp)

    def of_sum(self, num_terms: int) -> int:
        """Of so many terms, divided among the ranks."""
        return num_terms + 2 * self.ranks

    def own(self, magnitude: torch.Tensor, num: int, dtype: torch.dtype) -> torch.Tensor:
        """Of results of such magnitude, partial ones too, after `num` roundings and SPARE, in two programs."""
        count = num + SPARE
        u = max(self.u, torch.finfo(dtype).eps / 2)  # a module may compute in another dtype than its own
        lost = count * max(self.arithmetic.eta, self.arithmetic.eta_a, underflow(dtype_name(dtype)))
        return torch.where(magnitude == 0, 0.0, 2 * (gamma(count, u) * magnitude + lost))

    def rounded(self, value: torch.Tensor, error: torch.Tensor, magnitude: torch.Tensor, num: int = 0) -> Parts:
        """A result with what computing it adds: anything where it, or a share of it, may overflow.

        Infinity is for certain where nothing that came in is off, as in a mask.
        """
        masked = value.isinf() & (error == 0)
        error = error + self.own(magnitude, num, value.dtype)
        magnitude = torch.maximum(magnitude, value.double().abs()) + error
        largest = min(self.arithmetic.largest, torch.finfo(value.dtype).max)
        return Parts(value, torch.where(masked, 0.0, where_finite(magnitude, largest, error)), magnitude)


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


def total(r: Roundings, operand: Any, *, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Parts:
    a = Parts.of(operand)
    dims = dims_of(a.value, dim)
    value, error, magnitude = (part.sum(dims, keepdim) if dims else part.clone() for part in a)
    if dtype is not None:
        value = a.value.to(dtype).sum(dims, keepdim)
    return r.rounded(value, error, magnitude, r.of_sum(count_of(a.value, dims)))


def mean(r: Roundings, operand: Any, *, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Parts:
    value = Parts.of(operand).value
    count = count_of(value, dims_of(value, dim))
    return div(r, total(r, operand, dim=dim, keepdim=keepdim, dtype=dtype).wrapped(), float(count))


def amax(r: Roundings, operand: Any, *, dim: Dims = (), keepdim: bool = False) -> Parts:
    """Between the largest of v - e and the largest of v + e, each rounded once here: what is far below has no say."""
    a = Parts.of(operand)
    dims = dims_of(a.value, dim)
    value, most = a.value.amax(dims, keepdim), a.error.amax(dims, keepdim)
    low, high = (each.amax(dims, keepdim) for each in (a.value - a.error, a.value + a.error))
    error = torch.maximum(high - value, value - low) + 2 * U_REFERENCE * value.double().abs()
    return _chosen(value, torch.where(most == 0, 0.0, error.nan_to_num(nan=math.inf)))


def larger(r: Roundings, left: Any, right: Any) -> Parts:
    a, b = Parts.of(left), Parts.of(right)
    return _chosen(torch.maximum(a.value, b.value), torch.maximum(a.error, b.error))


def smaller(r: Roundings, left: Any, right: Any) -> Parts:
    a, b = Parts.of(left), Parts.of(right)
    return _chosen(torch.minimum(a.value, b.value), torch.maximum(a.error, b.error))


def relu(r: Roundings, operand: Any) -> Parts:
    a = Parts.of(operand)
    return _chosen(a.value.relu(), torch.where(a.value < -a.error, 0.0, a.error))


def absolute(r: Roundings, operand: Any) -> Parts:
    a = Parts.of(operand)
    return _chosen(a.value.abs(), a.error)


def sign(r: Roundings, operand: Any) -> Parts:
    a = Parts.of(operand)
    return _chosen(a.value.sign(), torch.where((a.size <= a.error) & (a.error > 0), 2.0, 0.0))


def _chosen(value: torch.Tensor, error: torch.Tensor) -> Parts:
    """What nothing rounds, its shares added before."""
    return Parts(value, error, value.double().abs() + error)


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
        return _chosen(a.value**exponent, torch.zeros_like(a.error))
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


def var_mean(
    r: Roundings,
    operand: Any,
    *,
    dim: Dims = None,
    correction: float | None = 1,
    unbiased: bool = True,
    keepdim: bool = False,
) -> tuple[Parts, Parts]:
    """Whatever the algorithm, squares of at most |x| + A are added up: see `equivtest.oracle.norms`."""
    a = Parts.of(operand)
    dims = dims_of(a.value, dim)
    num = count_of(a.value, dims)
    correction = (1 if correction is None else correction) if unbiased else 0
    divisor = max(num - correction, 0)
    centre = mean(r, operand, dim=dims, keepdim=True)
    apart, e_apart = (a.value.double() - centre.value).abs(), a.error + centre.error
    brought = (2 * apart * e_apart + e_apart.square()).sum(dims, keepdim) / divisor
    size = a.reach + a.reach.mean(dims, keepdim=True)
    spread = size.square().sum(dims, keepdim) / divisor
    value = a.value.var(dims, correction=correction, keepdim=keepdim)
    error = (brought + r.own(spread, r.of_sum(num), value.dtype)).nan_to_num(nan=math.inf)
    return _chosen(value, error), mean(r, operand, dim=dims, keepdim=keepdim)


def dims_of(value: torch.Tensor, dim: Dims) -> tuple[int, ...]:
    """The dims that are meant; none stands for all."""
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(value.dim()))
    return (dim,) if isinstance(dim, int) else tuple(dim)


def count_of(value: torch.Tensor, dims: Sequence[int]) -> int:
    return math.prod(value.shape[dim] for dim in dims)


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
    "square": lambda r, x: mul(r, x, x),
}  # fmt: skip
"""By operator, called with its operands in order."""

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": total, "mean": mean, "amax": amax, "var_mean": var_mean,
    "var": lambda r, operand, **how: var_mean(r, operand, **how)[0],
}  # fmt: skip
"""By operator, called with the operand, and all else by name."""
