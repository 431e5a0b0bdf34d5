"""Rules by which an operation propagates the errors of its operands, and adds its own roundings.

Letters: v the value of the unsharded module, e the largest error of a correct program, m the magnitude of its shares
(`equivtest.oracle.ranged`); n the number of terms of a sum. own(m, n) is the error of n roundings, and of a few spare
roundings, of a number of magnitude m. It is the sum of this error in the program and in the unsharded module
(`equivtest.oracle.running_roundings`). The operands of an operation are a and b: e_a is the error of a.

        a product              e = e_a (|v_b| + e_b) + |v_a| e_b,  m = m_a m_b,  and own(m, n) if it is summed
        a sum                  e = sum of e,  m = sum of m,  and own(m, n)
        monotonic f            e = the larger of |f(v + e) - f(v)| and |f(v - e) - f(v)|,  and own(|f| + e)
        a maximum, a relu      e of the operands, since no maximum moves further than its operands do

Derived here: a program with any order of summation, on any ranks, rounds each partial sum once. A partial sum is a sum
of some terms or shares, so it is at most m. An operation that is not linear needs the sum of all shares, so m starts
again from the value.

Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., sections 3.1 and 3.3 (running error analysis).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from equivtest.oracle.ranged import Parts, Ranged
from equivtest.oracle.running_roundings import Roundings, chosen

Rule = Callable[..., Parts]
Curve = Callable[[torch.Tensor], torch.Tensor]


def add(r: Roundings, left: Any, right: Any, *, alpha: float = 1, num: int = 0) -> Parts:
    """Computes left + alpha * right. `num` is the number of roundings besides the rounding of the addition.

    If a term is infinite and has no error, the sum is infinite and has no error too. The bound also holds for a program
    in which every rank holds the whole of one term and a share of the other: each rank then divides the whole term by
    the number of ranks and adds the quotient to its share.
    """
    a, b = Parts.of(left), Parts.of(right)
    value = torch.add(_plain(left), _plain(right), alpha=alpha)
    magnitude = a.magnitude + abs(alpha) * b.magnitude
    error = a.error + abs(alpha) * b.error + torch.maximum(r.divided(a), abs(alpha) * r.divided(b))
    total = r.rounded(
        value, error, magnitude, num, added=torch.maximum(a.reach, abs(alpha) * b.reach).expand(value.shape)
    )
    if bool((infinite := value.isinf()).any()):
        masked = infinite & ((a.value.isinf() & (a.error == 0)) | (b.value.isinf() & (b.error == 0)))
        total = total._replace(error=torch.where(masked, 0.0, total.error))
    return _beside(_beside(total, a, b, abs(alpha)), b._replace(magnitude=b.magnitude * abs(alpha)), a, 1.0)


def _beside(found: Parts, large: Parts, small: Parts, factor: float) -> Parts:
    """Returns the sum `found` with a narrower bound for elements in which one term is too huge for the other to matter.

    An example is a mask of torch.finfo(dtype).min plus a score.  Such an element does not overflow, because the other
    term moves it by less than half an ulp.  Its error is some ulps of the huge term, since each rank may hold a share
    of the sum.  A softmax turns the element into zero in any case.

    Args:
        large, small: The term that may be huge, and the other term.
        factor: Number that multiplies `small`.
    """
    finfo = torch.finfo(found.value.dtype)
    is_huge = (large.size > finfo.max / 2**10).expand(found.value.shape)
    if not bool(is_huge.any()):
        return found
    vanishes = 8 * factor * small.magnitude < finfo.eps * large.size
    is_known = large.error <= 2**10 * finfo.eps * large.size
    is_alone = is_huge & vanishes & is_known & found.value.isfinite()
    error = large.error + 8 * finfo.eps * large.size
    return found._replace(
        error=torch.where(is_alone, error, found.error),
        magnitude=torch.where(is_alone, large.size + error, found.magnitude),
    )


def exact_where(name: str, args: Sequence[Any], found: Parts) -> Parts:
    """Returns `found`, a constant of the module, with an error of 0 for the elements that no program rounds.

    Such elements are sums without a rounding, products with 0, 1 or -1, and exact conversions. Every program computes a
    constant in the same way. A program may compute an input in another way, because ranks may hold shares of the input,
    and the addition of shares rounds.
    """
    value, operands = found.value, [_plain(each) for each in args[:2]]
    if name in ("add", "sub", "rsub") and len(args) == 2:
        one, two = operands if name != "rsub" else (operands[1], operands[0])
        two = -two if name != "add" else two
        is_exact = (value - one == two) & (value - two == one)
    elif name == "mul":
        units = [torch.as_tensor(each).double().abs() for each in operands]
        is_exact = (((units[0] == 0) | (units[0] == 1)) | ((units[1] == 0) | (units[1] == 1))).expand(value.shape)
    elif name == "to":
        is_exact = value.double() == operands[0].double()
    elif name == "neg":
        is_exact = torch.ones_like(value, dtype=torch.bool)
    else:
        return found
    is_exact = is_exact & value.isfinite() & all_exact(args)
    size = value.double().abs()
    return Parts(value, torch.where(is_exact, 0.0, found.error), torch.where(is_exact, size, found.magnitude))


def all_exact(args: Sequence[Any]) -> torch.Tensor:
    errors = [Parts.of(each).error for each in args if isinstance(each, torch.Tensor)]
    return functools.reduce(torch.logical_and, [error == 0 for error in errors], torch.ones((), dtype=torch.bool))


def sub(r: Roundings, left: Any, right: Any, *, alpha: float = 1) -> Parts:
    return add(r, left, right, alpha=-alpha)


def rsub(r: Roundings, left: Any, right: Any, *, alpha: float = 1) -> Parts:
    return add(r, right, left, alpha=-alpha)


def mul(r: Roundings, left: Any, right: Any) -> Parts:
    a, b = Parts.of(left), Parts.of(right)
    error = _times(a.error, b.reach) + _times(b.error, a.size)
    product = r.rounded(torch.mul(_plain(left), _plain(right)), error, a.magnitude * b.magnitude)
    if r.arithmetic.flushes_subnormals:
        return product
    rounds_nothing = (_is_unit(left) | _is_unit(right)) & product.value.isfinite()
    return product._replace(error=torch.where(rounds_nothing, error, product.error))


def _is_unit(operand: Any) -> torch.Tensor:
    """Returns the mask of elements that are 0, 1 or -1 in every program.

    If the operand depends on the module's inputs or parameters, the mask is False for all elements, because ranks may
    hold shares of the operand.
    """
    a = Parts.of(operand)
    is_given = isinstance(operand, Ranged) and not operand.origin.is_constant
    return (a.error == 0) & ((a.size == 0) | (a.size == 1)) & (not is_given)


def matmul(r: Roundings, left: Any, right: Any) -> Parts:
    """Computes mm, bmm, mv and dot. These operations add products over the last dim of the left operand."""
    a, b = Parts.of(left), Parts.of(right)
    error = torch.matmul(a.error, b.reach) + torch.matmul(a.size, b.error)
    value, magnitude = torch.matmul(_plain(left), _plain(right)), torch.matmul(a.magnitude, b.magnitude)
    return r.summed(value, error, magnitude, left.shape[-1])


def _times(error: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Multiplies an error by a size. An error of zero stays zero, even if the size is infinite."""
    return torch.where(error == 0, 0.0, error * size)


def addmm(r: Roundings, plus: Any, left: Any, right: Any, *, beta: float = 1, alpha: float = 1) -> Parts:
    """Computes addmm, baddbmm and addmv. A kernel may add the products one by one to the first operand, as MKL does."""
    product = matmul(r, left, right).wrapped()
    if alpha != 1:
        product = mul(r, product, alpha).wrapped()
    return add(r, plus if beta == 1 else mul(r, plus, beta).wrapped(), product, num=left.shape[-1])


def div(r: Roundings, left: Any, right: Any) -> Parts:
    """Computes left / right.

    Ranks may hold shares of `left`, but a program must add the shares of `right` before it divides. No bound is known
    if the divisor may be zero.
    """
    a, b = Parts.of(left), Parts.of(right)
    least = b.size - b.error
    value = torch.div(_plain(left), _plain(right))
    error = (a.error + _times(b.error, value.double().abs())) / least
    sure = (least > 0).expand(value.shape)
    return r.rounded(value, torch.where(sure, error, math.inf), torch.where(sure, a.magnitude / least, math.inf))


def larger(r: Roundings, left: Any, right: Any) -> Parts:
    a, b = Parts.of(left), Parts.of(right)
    return chosen(torch.maximum(a.value, b.value), _error_of_one(a.value.double() - b.value.double(), a, b))


def smaller(r: Roundings, left: Any, right: Any) -> Parts:
    a, b = Parts.of(left), Parts.of(right)
    return chosen(torch.minimum(a.value, b.value), _error_of_one(b.value.double() - a.value.double(), a, b))


def _error_of_one(lead: torch.Tensor, one: Parts, two: Parts) -> torch.Tensor:
    """Returns the error of the operand that a maximum takes, or the larger error if a program may take either.

    `lead` is the distance between the two values, positive if the result is the value of `one`.
    """
    certain = torch.where(lead > 0, one.error, two.error)
    return torch.where(lead.abs() > one.error + two.error, certain, torch.maximum(one.error, two.error))


def relu(r: Roundings, operand: Any) -> Parts:
    a = Parts.of(operand)
    return chosen(a.value.relu(), torch.where(a.value < -a.error, 0.0, a.error))


def absolute(r: Roundings, operand: Any) -> Parts:
    a = Parts.of(operand)
    return chosen(a.value.abs(), a.error.clone())


def sign(r: Roundings, operand: Any) -> Parts:
    a = Parts.of(operand)
    return chosen(a.value.sign(), torch.where((a.size <= a.error) & (a.error > 0), 2.0, 0.0))


def threshold_backward(r: Roundings, cotangent: Any, operand: Any, threshold: float) -> Parts:
    """Returns the cotangent for elements at which the operand is above the threshold or NaN, and zero for all others.

    Source: threshold_kernel of ATen/native/cpu/Activation.cpp (2.13.0), which compares 16-bit operands in float32;
    another device may store the threshold.
    """
    a = Parts.of(operand)
    return passed(cotangent, ~(a.value.double() <= threshold), is_near(a, threshold, _off_if_stored(threshold, a)))


def passed(operand: Any, passes: torch.Tensor, unclear: torch.Tensor) -> Parts:
    """Returns the operand where `passes` is True, and zero elsewhere. Where `unclear`, the error allows both."""
    g = Parts.of(operand)
    error = torch.where(unclear, g.reach, torch.where(passes, g.error, 0.0))
    return Parts(torch.where(passes, g.value, 0.0), error, torch.where(passes | unclear, g.magnitude, 0.0))


def is_near(a: Parts, limit: float, off: float = 0.0) -> torch.Tensor:
    """True for elements that may lie on the other side of a limit in a correct program. `off` is the limit's error."""
    error = a.error + off
    return ((a.value.double() - limit).abs() <= error) & (error > 0)


def _off_if_stored(limit: float, a: Parts) -> float:
    return abs(float(torch.tensor(limit, dtype=torch.float64).to(a.value.dtype)) - limit)


def shrink(r: Roundings, operand: Any, lambd: float = 0.5) -> Parts:
    return shrink_backward(r, operand, operand, lambd)


def shrink_backward(r: Roundings, cotangent: Any, operand: Any, lambd: float) -> Parts:
    """Returns the cotangent for elements at which the operand is outside of [-lambd, lambd], and zero for all others.

    Source: hardshrink_kernel and shrink_backward_kernel of ATen/native/cpu/Activation.cpp (2.13.0), which store lambd.
    """
    a = Parts.of(operand)
    size = a._replace(value=a.value.abs())
    return passed(cotangent, size.value.double() > lambd, is_near(size, lambd, _off_if_stored(lambd, a)))


def where(r: Roundings, condition: torch.Tensor, left: Any, right: Any) -> Parts:
    a, b = Parts.of(left), Parts.of(right)
    value = torch.where(condition, _plain(left), _plain(right))
    return Parts(value, torch.where(condition, a.error, b.error), torch.where(condition, a.magnitude, b.magnitude))


def power(r: Roundings, operand: Any, exponent: Any) -> Parts:
    """Raises the operand to a power n. For n = 1, 2, 3, ... the error is (|v| + e)**n - |v|**n."""
    a, n = Parts.of(operand), float(exponent)
    if n >= 1 and n.is_integer():
        return r.rounded(a.value**exponent, a.reach**n - a.size**n, a.reach**n, int(n), stores=int(n))
    if n == 0:
        return chosen(a.value**exponent, torch.zeros_like(a.error))
    if n <= -1 and n.is_integer():
        return _negative_power(r, a, exponent)
    result = curve(r, operand, lambda x: x**exponent, above=0.0, stores=2 if n == -0.5 else 1)
    return _with_number_stored(result, a, lambda x, number: x**number, n)


def _negative_power(r: Roundings, a: Parts, exponent: Any) -> Parts:
    """Computes 1 over a product of equal factors.

    If the product may overflow, the bound allows a result of 0.  If the product may underflow, there is no bound.

    Source: pow_tensor_scalar_kernel of ATen/native/cpu/PowKernel.cpp (2.13.0), which in bfloat16 stores the square.
    """
    num, least = -int(exponent), a.size - a.error
    value, largest = a.value**exponent, torch.where(least > 0, least**-num, math.inf)
    error = torch.where(a.error == 0, 0.0, largest - a.size**-num)
    if num > 1:
        finfo = torch.finfo(a.value.dtype)
        error = error + torch.where(a.reach**num > finfo.max, value.double().abs(), 0.0)
        error = torch.where(least**num < finfo.smallest_normal, math.inf, error)
    return r.rounded(value, error.nan_to_num(nan=math.inf), largest, num, stores=num)


def _with_number_stored(
    found: Parts, a: Parts, f: Callable[[torch.Tensor, float], torch.Tensor], number: float
) -> Parts:
    """Returns `found`, the result of f(a, number), with a bound that also holds if a program first rounds `number`.

    Some kernels store the number in the tensor's dtype.

    Source: pow_tensor_scalar_kernel of ATen/native/cpu/PowKernel.cpp, and at::pow of a number and a tensor (2.13.0).
    """
    stored = float(torch.tensor(number, dtype=torch.float64).to(found.value.dtype))
    ends = [a.value.double() + sign * a.error for sign in (-1, 0, 1)]
    apart = torch.stack([(f(x, number) - f(x, stored)).abs().nan_to_num(nan=0.0) for x in ends]).amax(0)
    apart = torch.where(found.value.isfinite(), apart, 0.0)
    return found._replace(error=found.error + apart, magnitude=found.magnitude + apart)


def power_of(r: Roundings, base: float, exponent: Any) -> Parts:
    """Raises a number above zero to the power of each element, which is a monotonic function."""
    found = curve(r, exponent, lambda x: torch.pow(base, x))
    return _with_number_stored(found, Parts.of(exponent), lambda x, number: torch.pow(number, x), base)


def power_by(r: Roundings, operand: Any, exponent: Any) -> Parts:
    """Raises each element, above zero, to the power of the same element of `exponent`.

    The function is monotonic in each operand while the other is fixed. So its largest and smallest values lie where
    both operands are at an end of what they may be.
    """
    a, n = Parts.of(operand), Parts.of(exponent)
    bases, powers = ([part.value.double() + sign * part.error for sign in (-1, 1)] for part in (a, n))
    right = a.value.double() ** n.value.double()
    apart = torch.stack([(base**power - right).abs() for base in bases for power in powers]).amax(0)
    is_known = (a.error == 0) & (n.error == 0)
    error = torch.where(is_known, 0.0, torch.where(bases[0] > 0, apart.nan_to_num(nan=math.inf), math.inf))
    return r.rounded(a.value**n.value, error, right.abs() + error, r.of_curve)


def divided_to_whole(r: Roundings, dividend: Any, divisor: Any, *, rounding_mode: str) -> Parts:
    """Divides and rounds to a whole number, which is exact unless the quotient's error reaches another one."""
    return steps(r, div(r, dividend, divisor).wrapped(), torch.trunc if rounding_mode == "trunc" else torch.floor)


def curve(r: Roundings, operand: Any, f: Curve, *, above: float = -math.inf, stores: int = 1) -> Parts:
    """Applies f, monotonic for x > `above`. The bound follows from f(value - error) and f(value + error)."""
    a = Parts.of(operand)
    right, low, high = a.value.double(), a.value - a.error, a.value + a.error
    error = torch.maximum((f(high) - f(right)).abs(), (f(low) - f(right)).abs())
    error = torch.where((low > above) | (above == -math.inf), error.nan_to_num(nan=math.inf), math.inf)
    error = torch.where(a.error == 0, 0.0, error)
    value = f(a.value)
    return r.rounded(value, error, value.double().abs() + error, r.of_curve, stores=stores)


def sigmoid(r: Roundings, operand: Any) -> Parts:
    """Computes s = 1 / (1 + exp(-x)), which is zero if the exponential overflows.

    If x was rounded before, the exponential is off by |x| roundings. s is off by (1 - s) |x| roundings, because s' = s
    (1 - s).
    """
    a = Parts.of(operand)
    result = curve(r, operand, torch.sigmoid)
    rest = torch.sigmoid(a.error - a.value.double())  # 1 - s at most
    factor = 1 + torch.where(rest == 0, 0.0, a.reach * rest)
    return r.rounded(result.value, result.error + 2 / r.arithmetic.largest_a, result.magnitude * factor)


def rsqrt(r: Roundings, operand: Any) -> Parts:
    """Computes 1 / sqrt(x). torch's scalar code stores the root in 16 bits (UnaryOpsKernel.cpp, torch 2.13.0)."""
    return curve(r, operand, torch.rsqrt, above=0.0, stores=2)


def clamp(r: Roundings, operand: Any, *limits: Any, **named: Any) -> Parts:
    """Clamps between two limits. If a limit is a number, the kernel stores it in the operand's dtype."""
    low, high = (*limits, None, None)[:2]
    result = operand
    for limit, change in ((named.get("min", low), larger), (named.get("max", high), smaller)):
        if limit is not None:
            plain = limit if isinstance(limit, torch.Tensor) else torch.tensor(limit).to(operand.dtype)
            result = change(r, result, plain).wrapped()
    return Parts.of(result)


def steps(r: Roundings, operand: Any, f: Curve) -> Parts:
    """Applies floor, ceil, trunc or round. The result is exact unless the error reaches another whole number."""
    a = Parts.of(operand)
    value = f(a.value)
    apart = [(f(each) - value.double()).abs() for each in (a.value.double() + a.error, a.value.double() - a.error)]
    return chosen(value, torch.where(a.error == 0, 0.0, torch.maximum(*apart).nan_to_num(nan=math.inf)))


def wave(r: Roundings, operand: Any, f: Curve) -> Parts:
    """Applies sin or cos, whose slope is at most 1."""
    a = Parts.of(operand)
    value = f(a.value)
    return r.rounded(value, a.error.clamp(max=2.0), value.double().abs() + 1, r.of_curve)


def _plain(operand: Any) -> Any:
    """Returns the value of a tensor, and a number unchanged, because a tensor could change the result's dtype."""
    return Parts.of(operand).value if isinstance(operand, torch.Tensor) else operand


def _curve(f: Curve, above: float = -math.inf) -> Rule:
    return lambda r, operand: curve(r, operand, f, above=above)


def _steps(f: Curve) -> Rule:
    return lambda r, operand: steps(r, operand, f)


def _wave(f: Curve) -> Rule:
    return lambda r, operand: wave(r, operand, f)


RULES: dict[str, Rule] = {
    "add": add, "sub": sub, "rsub": rsub, "mul": mul, "div": div, "neg": lambda r, x: mul(r, x, -1),
    "mm": matmul, "bmm": matmul, "mv": matmul, "dot": matmul, "addmm": addmm, "baddbmm": addmm, "addmv": addmm,
    "maximum": larger, "minimum": smaller, "relu": relu, "threshold_backward": threshold_backward, "where": where,
    "hardshrink": shrink, "hardshrink_backward": shrink_backward, "softshrink_backward": shrink_backward,
    "abs": absolute, "sign": sign, "sgn": sign, "exp": _curve(torch.exp), "log": _curve(torch.log, 0.0),
    "sqrt": _curve(torch.sqrt, 0.0), "rsqrt": rsqrt, "erf": _curve(torch.erf),
    "tanh": _curve(torch.tanh), "sigmoid": sigmoid, "expm1": _curve(torch.expm1), "log1p": _curve(torch.log1p, -1.0),
    "sin": _wave(torch.sin), "cos": _wave(torch.cos), "pow": power, "reciprocal": lambda r, x: div(r, 1, x),
    "square": lambda r, x: mul(r, x, x), "exp2": _curve(torch.exp2), "log2": _curve(torch.log2, 0.0),
    "log10": _curve(torch.log10, 0.0), "sinh": _curve(torch.sinh), "asinh": _curve(torch.asinh),
    "atan": _curve(torch.atan), "erfc": _curve(torch.erfc), "floor": _steps(torch.floor), "ceil": _steps(torch.ceil),
    "trunc": _steps(torch.trunc), "round": _steps(torch.round),
}  # fmt: skip
"""Operator -> rule, called with `Roundings` and the operator's operands in order."""
