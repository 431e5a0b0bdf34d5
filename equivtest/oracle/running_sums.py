"""Rules of sums, means, maxima and variances: see `equivtest.oracle.running_rules`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from equivtest.oracle.ranged import Parts
from equivtest.oracle.rounding import SLACK_TERMS, U_REFERENCE
from equivtest.oracle.running_roundings import Roundings, chosen
from equivtest.oracle.running_rules import div, sub

Dims = int | Sequence[int] | None


def total(r: Roundings, operand: Any, *, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Parts:
    a = Parts.of(operand)
    dims = dims_of(a.value, dim)
    value, error, magnitude = (part.sum(dims, keepdim) if dims else part.clone() for part in a)
    if dtype is not None:
        value = a.value.to(dtype).sum(dims, keepdim)
    return r.summed(value, error, magnitude, count_of(a.value, dims))


def mean(r: Roundings, operand: Any, *, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Parts:
    value = Parts.of(operand).value
    count = count_of(value, dims_of(value, dim))
    return div(r, total(r, operand, dim=dim, keepdim=keepdim, dtype=dtype).wrapped(), float(count))


def amax(r: Roundings, operand: Any, *, dim: Dims = (), keepdim: bool = False) -> Parts:
    """Returns the largest element x. Each element has a value and an error.

    In a correct program x lies between max(value - error) and max(value + error), so the errors of much smaller
    elements have no influence.  Both limits are rounded once here.
    """
    a = Parts.of(operand)
    dims = dims_of(a.value, dim)
    value, most = a.value.amax(dims, keepdim), a.error.amax(dims, keepdim)
    low, high = (each.amax(dims, keepdim) for each in (a.value - a.error, a.value + a.error))
    error = torch.maximum(high - value, value - low) + 2 * U_REFERENCE * value.double().abs()
    return chosen(value, torch.where(most == 0, 0.0, error.nan_to_num(nan=math.inf)))


def amin(r: Roundings, operand: Any, *, dim: Dims = (), keepdim: bool = False) -> Parts:
    """Returns the smallest element: see `amax`."""
    a = Parts.of(operand)
    found = amax(r, a._replace(value=-a.value).wrapped(), dim=dim, keepdim=keepdim)
    return found._replace(value=-found.value)


def var_mean(
    r: Roundings,
    operand: Any,
    *,
    dim: Dims = None,
    correction: float | None = 1,
    unbiased: bool = True,
    keepdim: bool = False,
) -> tuple[Parts, Parts]:
    """Returns the variance and the mean, with bounds for any algorithm: see `equivtest.families.norm.oracle.norms`."""
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
    error = (brought + r.own(Parts(value, brought, spread), num, added=spread)).nan_to_num(nan=math.inf)
    return chosen(value, error), mean(r, operand, dim=dims, keepdim=keepdim)


def softmax(r: Roundings, operand: Any, dim: int, half_to_float: bool = False) -> Parts:  # noqa: FBT001, FBT002
    """Computes a softmax of terms that may each be off by an error.

    An element of a softmax rises with its own term, falls with every other term, and is at most 1. A softmax does not
    change if a kernel first subtracts a number, such as the maximum, from all terms.

    Derived here. Let p be the softmax and e the error of each term. An element is largest if its own term is larger by
    e, and all other terms are smaller by their errors: p exp(e) / (p exp(e) + sum of the others' p exp(-e)). An element
    is smallest if all errors have the opposite signs.
    """
    a = Parts.of(operand)
    if not a.value.numel():
        return chosen(torch._softmax(a.value, dim, half_to_float), torch.zeros_like(a.error))
    alone = a._replace(error=torch.zeros_like(a.error))
    largest = amax(r, alone.wrapped(), dim=[dim], keepdim=True)
    off = a.error + sub(r, alone.wrapped(), largest.wrapped()).error  # the subtraction rounds
    logarithm = a.value.double().log_softmax(dim)  # an underflow here may be none with a large error
    p = logarithm.exp()
    more, less = (torch.where(a.value == -math.inf, 0.0, (logarithm + sign * off).exp()) for sign in (1, -1))
    high = more / (more + less.sum(dim, keepdim=True) - less)
    low = less / (less + more.sum(dim, keepdim=True) - more)
    error = torch.maximum(high.nan_to_num(nan=1.0) - p, p - low.nan_to_num(nan=0.0)).clamp(0.0, 1.0)
    num = a.value.shape[dim] if a.value.dim() else 1
    error = torch.where(p.isnan(), math.inf, error + (num + SLACK_TERMS) * U_REFERENCE * (a.value != -math.inf))
    return r.rounded(torch._softmax(a.value, dim, half_to_float), error, p + error, 2 * r.of_curve + num + 1)


def dims_of(value: torch.Tensor, dim: Dims) -> tuple[int, ...]:
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(value.dim()))
    return (dim,) if isinstance(dim, int) else tuple(dim)


def count_of(value: torch.Tensor, dims: Sequence[int]) -> int:
    return math.prod(value.shape[dim] for dim in dims) if value.dim() else 1  # a number has the dims 0 and -1


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": total, "mean": mean, "amax": amax, "amin": amin, "var_mean": var_mean, "_softmax": softmax,
    "var": lambda r, operand, **how: var_mean(r, operand, **how)[0],
}  # fmt: skip
"""Operator -> rule, called with `Roundings`, the operand, and all other arguments by name."""
