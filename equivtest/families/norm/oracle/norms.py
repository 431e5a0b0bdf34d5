"""Bounds of layer_norm and rms_norm, forward and backward, for any algorithm of the moments.

Letters: T tokens, D features of a token x, mu its mean (0 in rms_norm), v = mean (x - mu)**2 + eps,
r = v**(-1/2), g the cotangent, g' = g w, s = mean g' (x - mu), c = mean g'; u the roundoff of
accumulation, f the error of sqrt in ulp.

    y = (x - mu) r w + b        grad.x = r (g' - c) - r**3 s (x - mu)
    grad.weight = sum over tokens of g (x - mu) r,  grad.bias = sum of g

Derived here. A = mean |x|, Q = mean x**2. mu is off by gamma(D + 1) A. Two passes, one pass with mean x**2 - mu**2, and
Welford's updates all compute v from sums of squares of at most |x| + A: v is off by gamma(D + 4) (Q + 3 A**2). r is
monotonic in v, and its own computation adds an error of (f + 3) ulp. Kernels expand the products (x r - mu r, g' r + b
x + c), so that each rounding is of |x| + |mu|, not of |x - mu|.

In 16 bits torch's CPU kernels save mu and r for the backward. They accumulate the gradients of weight and bias over
tokens in the storage dtype. `equivtest.oracle.rounding.after_additions` bounds the error of these additions. rms_norm
stores x r before it multiplies.

Source: ATen/native/cpu/layer_norm_kernel.cpp, ATen/native/layer_norm.cpp (2.13.0); Higham, Accuracy
and Stability of Numerical Algorithms, 2nd ed., sections 1.9 (variance) and 3.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from equivtest.oracle.rounding import Arithmetic, Bounded, after_additions, bounded, gamma, growth, store


@dataclass(frozen=True)
class _Moments:
    """Mean (0 for rms_norm) and 1 / deviation of each token, with their errors, in float64, one row per token."""

    mean: torch.Tensor
    rstd: torch.Tensor
    e_mean: torch.Tensor
    e_rstd: torch.Tensor

    def saved(self, arithmetic: Arithmetic) -> _Moments:
        """Returns the moments for the backward, with the errors of storing them in the tensors' dtype."""
        if arithmetic.dtype == arithmetic.accumulate:
            return self
        e_mean = store(self.mean, self.e_mean, arithmetic)
        return _Moments(self.mean, self.rstd, e_mean, store(self.rstd, self.e_rstd, arithmetic))


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    arithmetic: Arithmetic,
    *,
    eps: float,
    centered: bool,
) -> Bounded:
    """Returns the output (tokens, features) with its bound.

    Args:
        weight, bias: One element per feature: ones and zeros if the layer has no weight and no bias.
        centered: True for layer_norm, which subtracts the mean; False for rms_norm.
    """
    x, weight, bias = x.double(), weight.double(), bias.double()
    moments = _moments(x, arithmetic, eps=eps, centered=centered)
    normed, e_normed = _normalized(x, moments, arithmetic)
    if not centered:
        e_normed = store(normed, e_normed, arithmetic)
    u, reach = arithmetic.u_a, (x.abs() + moments.mean.abs()) * (moments.rstd + moments.e_rstd)
    value = normed * weight + bias
    magnitude = (normed.abs() + e_normed + reach) * weight.abs() + bias.abs()
    error = store(value, e_normed * weight.abs() + 4 * u * magnitude, arithmetic)
    return bounded(value, error, magnitude * _reference_growth(x, moments), x.shape[1], _derivation(x, arithmetic))


def norm_grad_x(
    x: torch.Tensor,
    weight: torch.Tensor,
    cotangent: torch.Tensor,
    arithmetic: Arithmetic,
    *,
    eps: float,
    centered: bool,
) -> Bounded:
    """Returns the gradient of x (tokens, features) with its bound. For the arguments see `norm`."""
    x, u, num = x.double(), arithmetic.u_a, x.shape[1]
    moments = _moments(x, arithmetic, eps=eps, centered=centered).saved(arithmetic)
    given = cotangent.double() * weight.double()  # g'
    e_given = (u + _u_stored(arithmetic)) * given.abs()
    apart, reach = x - moments.mean, x.abs() + moments.mean.abs()
    most = moments.rstd + moments.e_rstd
    of_mean, of_slope = given.abs().mean(1, keepdim=True), (given.abs() * reach).mean(1, keepdim=True)
    shift = given.mean(1, keepdim=True) if centered else torch.zeros_like(moments.mean)  # c
    e_shift = gamma(num + 3, u) * of_mean + e_given.mean(1, keepdim=True) if centered else shift
    slope = (given * apart).mean(1, keepdim=True)  # s
    e_slope = gamma(num + 5, u) * of_slope + (e_given * reach).mean(1, keepdim=True) + moments.e_mean * of_mean
    e_slope = e_slope + _u_stored(arithmetic) * of_slope  # x r and g' as they were stored
    factor = moments.rstd**3 * slope
    e_factor = most**3 * e_slope + (most**3 - moments.rstd**3) * slope.abs() + 6 * u * most**3 * (slope.abs() + e_slope)
    value = moments.rstd * (given - shift) - factor * apart
    magnitude = most * (given.abs() + shift.abs() + e_shift) + (factor.abs() + e_factor) * reach
    error = moments.e_rstd * (given.abs() + shift.abs()) + most * (e_given + e_shift)
    error = error + e_factor * apart.abs() + (factor.abs() + e_factor) * moments.e_mean
    error = store(value, error + (8 * u + _u_stored(arithmetic)) * magnitude, arithmetic)
    return bounded(value, error, magnitude * _reference_growth(x, moments), num, _derivation(x, arithmetic))


def norm_grad_weight(
    x: torch.Tensor,
    cotangent: torch.Tensor,
    arithmetic: Arithmetic,
    *,
    rank_of: torch.Tensor,
    eps: float,
    centered: bool,
) -> Bounded:
    """Returns the gradient of the weight with its bound. `rank_of` has the rank of each token."""
    x, given = x.double(), cotangent.double()
    moments = _moments(x, arithmetic, eps=eps, centered=centered).saved(arithmetic)
    normed, e_normed = _normalized(x, moments, arithmetic)
    if not centered:
        e_normed = store(normed, e_normed, arithmetic)
    reach = (x.abs() + moments.mean.abs()) * (moments.rstd + moments.e_rstd)
    magnitude = (given.abs() * (normed.abs() + e_normed)).sum(0)
    error = (given.abs() * (e_normed + 4 * arithmetic.u_a * reach)).sum(0)
    error = _over_tokens(given * normed, magnitude, error, rank_of, arithmetic)
    reference = magnitude * float(_reference_growth(x, moments).max())
    return bounded((given * normed).sum(0), error, reference, len(x) + x.shape[1], _derivation(x, arithmetic))


def norm_grad_bias(cotangent: torch.Tensor, arithmetic: Arithmetic, *, rank_of: torch.Tensor) -> Bounded:
    given = cotangent.double()
    value, magnitude = given.sum(0), given.abs().sum(0)
    error = _over_tokens(given, magnitude, torch.zeros_like(value), rank_of, arithmetic)
    return bounded(value, error, magnitude, len(given), f"{len(given)} additions of {arithmetic.dtype}")


def _moments(x: torch.Tensor, arithmetic: Arithmetic, *, eps: float, centered: bool) -> _Moments:
    num, u = x.shape[1], arithmetic.u_a
    mean_abs, squares = x.abs().mean(1, keepdim=True), (x * x).mean(1, keepdim=True)
    mean = x.mean(1, keepdim=True) if centered else torch.zeros_like(mean_abs)
    e_mean = gamma(num + 1, u) * mean_abs if centered else mean
    spread = squares + 3 * mean_abs**2 if centered else squares
    variance = ((x - mean) ** 2).mean(1, keepdim=True) + eps
    e_variance = gamma(num + 4, u) * spread + 2 * u * variance
    rstd = variance.rsqrt()
    least = (variance - e_variance).clamp(min=0)
    e_rstd = least.rsqrt() - rstd + (arithmetic.libm_ulp + 3) * 2 * u * rstd
    return _Moments(mean, rstd, e_mean, torch.where(least > 0, e_rstd, math.inf))


def _normalized(x: torch.Tensor, moments: _Moments, arithmetic: Arithmetic) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (x - mean) / deviation and its error, both (tokens, features)."""
    most, apart = moments.rstd + moments.e_rstd, x - moments.mean
    roundings = 4 * arithmetic.u_a * (x.abs() + moments.mean.abs() + moments.e_mean)
    return apart * moments.rstd, (moments.e_mean + roundings) * most + apart.abs() * moments.e_rstd


def _reference_growth(x: torch.Tensor, moments: _Moments) -> torch.Tensor:
    """Returns the growth of the float64 reference's roundings, large if the mean far exceeds the deviation."""
    return 1 + (x * x).mean(1, keepdim=True) * moments.rstd**2


def _over_tokens(
    terms: torch.Tensor, magnitude: torch.Tensor, error: torch.Tensor, rank_of: torch.Tensor, arithmetic: Arithmetic
) -> torch.Tensor:
    """Returns the error of the sum of `terms` over tokens, one error per feature.

    Each rank adds its terms, then a collective adds the ranks' sums. The sums are kept in the storage dtype. The error
    allows that each term is stored before it is added, and that each addition rounds to the accumulator's dtype before
    it rounds to the storage dtype.
    """
    u = growth((1, arithmetic.u_o), (1, arithmetic.u_a))
    ranks = set(rank_of.tolist())
    sums = torch.stack([terms[rank_of == rank].sum(0).abs() for rank in ranks]).sum(0)
    error = error + growth((2, arithmetic.u_o), (2, arithmetic.u_a)) * (magnitude + error)
    error = error + len(terms) * arithmetic.eta_r
    error = after_additions(sums, magnitude, error, int(rank_of.bincount().max()) - 1, u)
    error = after_additions(terms.sum(0), sums, error, len(ranks) - 1, arithmetic.u_r)
    return store(terms.sum(0), error, arithmetic)


def _u_stored(arithmetic: Arithmetic) -> float:
    """Returns the relative error of storing a number, 0 if sums accumulate in the tensors' dtype."""
    return 0.0 if arithmetic.dtype == arithmetic.accumulate else arithmetic.u_o


def _derivation(x: torch.Tensor, arithmetic: Arithmetic) -> str:
    return f"gamma({x.shape[1]} + 4 roundings of {arithmetic.accumulate}) of the moments, stored in {arithmetic.dtype}"
