"""Bounds the norm over all gradients, and the gradients clipped by it, from the values that the ranks really had.

Letters: g all elements of all gradients, p the norm's type, N = (sum |g|**p)**(1/p), c the largest norm allowed, u_o
and u_a the unit roundoffs of the storage and of the accumulate dtype, w ranks on an axis of the mesh. Each gradient is
multiplied by min(1, c / (N + 1e-6)).

For p = inf the norm is one of the elements' magnitudes, and nothing rounds. For p = 1 a sum of magnitudes is exact if
the magnitudes are integers of few enough bits (`equivtest.oracle.exact`). Otherwise the bound is derived here, for
every program that takes norms of subsets and then the norm of these norms. In S = sum |g|**p all terms have one sign,
so every error is relative. A term in a subset of n terms has the error gamma(n, u_a). A stored norm is the root of a
sum. Its rounding causes an error of p (u_o + f u_a) in S, where f u_a is the error of the root function.

The subsets are the ranks' shards of a tensor. The norms of the shards are combined along one axis of the mesh after the
other. For each axis, each rank stores the power of its norm, a collective adds w powers, and the root of the sum is
stored. At last the norms of the tensors are combined. A power that underflows counts as a rounding. If a power
overflows although the norm does not, this is an error of the subject: a correct subject computes the power in more
bits, or scales the terms.

A gradient whose factor is certainly 1 is a copy. Otherwise the factor has three roundings: of the sum, of its
reciprocal, and of the product with c. The product with the gradient has one more.

Source: torch/nn/utils/clip_grad.py and _NormPartial in torch/distributed/tensor/_ops/_math_ops.py (2.13.0); Higham,
lemma 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from equivtest.families.training.oracle.optimizers import Interval
from equivtest.oracle.exact import Sum, find_integers, sum_terms
from equivtest.oracle.operations import Found, Operations
from equivtest.oracle.rounding import Arithmetic, Bounded, bounded, gamma, growth, where_finite
from equivtest.tensors import DTYPES

EPS = 1e-6
"""Number that is added to the norm before the division."""


def total_norm(gradients: Sequence[torch.Tensor], norm_type: str, axes: Iterable[int], operations: Operations) -> Found:
    """Returns the norm of all elements of all gradients, a 0-dim tensor, with its bound.

    `axes` are the numbers of ranks along the mesh axes over which norms are reduced, one axis after the other.
    """
    elements = torch.cat([gradient.reshape(-1) for gradient in gradients]).abs()
    if norm_type == "inf":
        return Found(elements.max(), None, "equal: the largest magnitude is one of them")
    operations = replace(operations, may_be_exact=operations.may_be_exact and norm_type == "1")
    return operations.choose(
        lambda: _sum_exactly(elements, operations),
        lambda: _norm_within(gradients, elements, float(norm_type), tuple(axes), operations.arithmetic),
    )


def _sum_exactly(elements: torch.Tensor, operations: Operations) -> Sum:
    found = sum_terms("norm", find_integers("gradients", elements[:, None]), DTYPES[operations.dtype])
    return Sum(found.value[0], found.bits_used)


def _norm_within(
    gradients: Sequence[torch.Tensor], elements: torch.Tensor, p: float, axes: tuple[int, ...], arithmetic: Arithmetic
) -> Bounded:
    if not bool(elements.any()):
        return Bounded(elements.max(), torch.zeros_like(elements.max()), "equal: the norm of zeros alone")
    num_tensors, largest = len(gradients), max(gradient.numel() for gradient in gradients)
    num_norms = len(axes) + 2  # norms stored: of a rank's shard, along each axis, of all tensors
    num_shares = num_tensors * math.prod(axes)
    root = 2 * arithmetic.libm_ulp + 2
    roundings = growth(
        (round(p * num_norms) + len(axes), arithmetic.u_o),
        (round((p * num_norms + len(axes)) * root) + num_tensors + 1, arithmetic.u_a),
        (sum(size - 1 for size in axes), arithmetic.u_r),
    )
    relative = (1 + gamma(largest + 1, arithmetic.u_a)) * (1 + roundings) - 1
    size = elements.max().clamp(min=float(torch.finfo(torch.float64).tiny))  # divided by it, no power overflows
    norm = size * (elements / size).pow(p).sum().pow(1 / p)
    lost = len(elements) * arithmetic.eta_a + num_shares * len(axes) * arithmetic.eta  # in S: powers that underflow
    error = _reach(norm, p, relative, lost) + num_norms * num_shares * arithmetic.eta
    error = where_finite(norm + error, arithmetic.largest, error)
    derivation = f"{num_norms} stored norms of {arithmetic.dtype}, {relative:.1e} of the sum of powers"
    return bounded(norm, error, norm, len(elements), derivation)


def _reach(norm: torch.Tensor, p: float, relative: float, absolute: float) -> torch.Tensor:
    """Returns a bound for the error of the p-th root of a sum whose error is `relative` * sum + `absolute`."""
    power = norm.pow(p)
    share = relative + absolute / power
    low, high = (1 - share).clamp(min=0).pow(1 / p), (1 + share).pow(1 / p)
    return torch.where(power > 0, norm * torch.maximum(1 - low, high - 1), norm + absolute ** (1 / p))


def clipped(gradient: torch.Tensor, norm: torch.Tensor, max_norm: float, arithmetic: Arithmetic) -> Found:
    """Returns the gradient after clipping, with its bound. `norm` is the ranks' value, over all parameters."""
    u_o, u_a, eta = arithmetic.u_o, arithmetic.u_a, arithmetic.eta
    shifted = Interval.of(norm).plus(Interval.of(torch.tensor(EPS, dtype=torch.float64)))
    shifted = shifted.widened(growth((1, u_o), (2, u_a)), eta)
    one = Interval.of(torch.tensor(1.0, dtype=torch.float64))
    reciprocal = one.over(shifted).widened(growth((1, u_o), (1, u_a)), eta)
    factor = reciprocal.times(max_norm).widened(growth((1, u_o), (2, u_a)), eta)
    low, high = float(factor.low.clamp(0, 1)), float(factor.high.clamp(0, 1))
    if low == 1.0:
        return Found(gradient, None, "equal: the norm is within bounds, nothing is scaled")
    right = gradient * min(1.0, max_norm / (float(norm) + EPS))
    ends = torch.stack([gradient * low, gradient * high])
    reach = Interval(ends.amin(0), ends.amax(0)).widened(growth((1, u_o), (1, u_a)), eta)
    error = torch.where(gradient == 0, 0.0, torch.maximum(reach.high - right, right - reach.low))
    derivation = f"a factor of 3 roundings of {arithmetic.dtype}, and its product"
    return Found.within(bounded(right, error, right.abs(), 1, derivation))
