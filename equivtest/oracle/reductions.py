"""Bounds means, norms, maxima and softmaxes, forward and backward, for any divided dim.

Letters: rows x (K, R) of R terms each, w ranks, g the cotangent, (K, 1) or of softmaxes (K, R);
u the roundoff of accumulation, f the error of exp, log and roots in ulp; m, d, s and l as in
`equivtest.oracle.losses`, p = exp(d - l); A = mean |x|.

    mean      sums over ranks of means of their own, or one mean of all: gamma(R + 1) A of
              accumulation; of what ranks store, w - 1 additions and the division of a collective
    norm      y = sqrt(sum x**2): roots of ranks' sums, squared, added, and rooted again
    amax      g over the number of largest terms goes to each of them
    softmax   grad = p (g - sum p g);   log_softmax   grad = g - p sum g

Derived here.  Every term, or partial sum, of a mean is multiplied by at most so many factors 1 + u.  All terms of a
norm are positive, so its square is off by a relative bound t, and the norm by t / 2 (1 - t).
A collective needs the squares: if a norm n is stored in 16 bits they underflow, by eta / 2 n in the end.
For the error of a softmax see `losses`; its gradients are sums of products with the stored p.  In
16 bits torch's CPU kernels store more intermediate results: exponentials before they are divided, the sum
of exponentials and its logarithm, the sum of g.  The maximum is subtracted from x before the logarithm, so
the size of x itself, which all terms of a row may share, does not matter.

Source: common_reduction_strategy and _NormPartial in torch/distributed/tensor/_ops/_math_ops.py;
norm_backward, scale_grad_by_count in torch/csrc/autograd/FunctionsManual.cpp;
vec_softmax and vec_log_softmax_lastdim_chunk_kernel in ATen/native/cpu/SoftMaxKernel.cpp (2.13.0); Higham, Accuracy
and Stability of Numerical Algorithms, 2nd ed., sections 3.1 and 4.2.
"""

from __future__ import annotations

import torch

from equivtest.oracle.losses import exp_error, log_of_sum, rounded, stored, sure
from equivtest.oracle.rounding import Arithmetic, Bounded, bounded, gamma, growth, store

_ALONE = "equal: the softmax of one term is exp 0 over itself, and a cotangent minus itself is 0"


def mean(x: torch.Tensor, arithmetic: Arithmetic, *, ranks: int, partials: torch.Tensor | None = None) -> Bounded:
    """Means of rows, (K,).

    Args:
        partials: (K,), the sum over the ranks of |the sum of their terms|, if the partition is known.
    """
    num, magnitude = x.shape[1], x.abs().mean(1)
    error = gamma(num + 1, arithmetic.u_a) * magnitude + 2 * ranks * arithmetic.eta
    if ranks > 1:
        stored_means = (magnitude if partials is None else partials / num) + error
        error = error + growth((ranks - 1, arithmetic.u_r), (3, arithmetic.u_o)) * stored_means
    value = x.mean(1)
    derivation = f"{num + 1} roundings of {arithmetic.accumulate}, {ranks - 1} of {arithmetic.reduce}, of mean |x|"
    return bounded(value, store(value, error, arithmetic), magnitude, num, derivation)


def mean_grad(x: torch.Tensor, cotangent: torch.Tensor, arithmetic: Arithmetic) -> Bounded:
    """g / R, or g times 1 / R, (K, R)."""
    value = (cotangent / x.shape[1]).expand(x.shape).clone()
    exact = torch.zeros_like(value) if x.shape[1] & (x.shape[1] - 1) == 0 else arithmetic.u_o * value.abs()
    error = rounded(value, exact, arithmetic)
    return sure(value, error, value.abs(), 1, f"2 roundings of {arithmetic.dtype}")


def amax_grad(x: torch.Tensor, cotangent: torch.Tensor, arithmetic: Arithmetic) -> Bounded:
    """g over the number of largest terms at the largest terms, else 0: (K, R)."""
    largest = x == x.amax(1, keepdim=True)
    value = largest * cotangent / largest.sum(1, keepdim=True)
    error = rounded(value, torch.zeros_like(value), arithmetic)
    return sure(value, error, value.abs(), 1, f"1 rounding of {arithmetic.dtype}")


def norm(x: torch.Tensor, arithmetic: Arithmetic, *, ranks: int) -> Bounded:
    """Roots of sums of squares of rows, (K,)."""
    value = x.square().sum(1).sqrt()
    error = store(value, _norm_error(x, value, arithmetic, ranks), arithmetic)
    derivation = f"half of {x.shape[1] + 1} roundings of {arithmetic.accumulate} and {ranks - 1} of {arithmetic.reduce}"
    return bounded(value, error, value, x.shape[1], derivation)


def _norm_error(x: torch.Tensor, value: torch.Tensor, arithmetic: Arithmetic, ranks: int) -> torch.Tensor:
    root = 2 * int(arithmetic.libm_ulp) + 1
    twice = ((2 * root, arithmetic.u_a), (2, arithmetic.u_o))  # a rank's own root, whose error is doubled by squaring
    squared = ((root, arithmetic.u_a), (1, arithmetic.u_o), (ranks - 1, arithmetic.u_r))
    t = growth((x.shape[1] + 1, arithmetic.u_a), *((*twice, *squared) if ranks > 1 else ()))
    lost = ranks * arithmetic.eta / (2 * value) if ranks > 1 else torch.zeros_like(value)
    return value * (t / (2 * (1 - t)) + growth((root, arithmetic.u_a))) + lost + x.shape[1] * arithmetic.eta_a


def norm_grad(x: torch.Tensor, cotangent: torch.Tensor, arithmetic: Arithmetic, *, ranks: int) -> Bounded:
    """g x / y, (K, R), with the stored y; g / y or x / y is stored, and x / y may underflow."""
    y = norm(x, arithmetic, ranks=ranks)
    size, e_size = y.value.unsqueeze(1), y.allowed.unsqueeze(1)
    scale = cotangent / size
    e_scale = store(scale, scale.abs() * e_size / (size - e_size), arithmetic)
    value = x * scale
    lost = cotangent.abs() * arithmetic.eta * (x != 0).double()
    error = store(value, x.abs() * e_scale + lost, arithmetic)
    return bounded(value, error, value.abs(), 3, f"{y.derivation}, 2 of {arithmetic.dtype}")


def softmax(x: torch.Tensor, arithmetic: Arithmetic) -> Bounded:
    """p, (K, R)."""
    y = log_of_sum(x, arithmetic, ranks=1)
    p = y.value.exp()
    if x.shape[1] == 1:
        return Bounded(p, torch.zeros_like(p), _ALONE)
    error = exp_error(p, y.allowed + 3 * arithmetic.u_a, arithmetic)
    if arithmetic.dtype != arithmetic.accumulate:
        error = store(p, error, arithmetic, times=2)
    return bounded(p, error, p * (1 + y.value.abs()), x.shape[1], y.derivation)


def softmax_grad(x: torch.Tensor, cotangent: torch.Tensor, arithmetic: Arithmetic) -> Bounded:
    """p (g - sum p g), (K, R), with the stored p."""
    y, u, num = softmax(x, arithmetic), arithmetic.u_a, x.shape[1]
    if num == 1:
        return Bounded(torch.zeros_like(x), torch.zeros_like(x), _ALONE)
    p, e_p = y.value, y.allowed
    shift, magnitude = ((p * each).sum(1, keepdim=True) for each in (cotangent, cotangent.abs()))
    e_shift = gamma(num + 2, u) * magnitude + (e_p * cotangent.abs()).sum(1, keepdim=True) * (1 + gamma(num, u))
    apart = cotangent - shift
    error = (p + e_p) * (e_shift + 3 * u * (cotangent.abs() + magnitude)) + e_p * apart.abs()
    value = p * apart
    sizes = p * (cotangent.abs() + magnitude) * (1 + y.value.log().abs())
    return bounded(value, store(value, error, arithmetic), sizes, num, f"{y.derivation}, and of sum p g")


def log_softmax(x: torch.Tensor, arithmetic: Arithmetic) -> Bounded:
    """y, (K, R), by a kernel that may store sum and logarithm as intermediate results."""
    y = log_of_sum(x, arithmetic, ranks=1)
    if x.shape[1] == 1:
        return Bounded(y.value, torch.zeros_like(x), _ALONE)
    apart = (x - x.amax(1, keepdim=True)).abs()
    size = 1 + (apart + y.value).abs()  # a relative error of the sum shifts its logarithm l by as much; and l
    narrow = growth((2, arithmetic.u_o)) if arithmetic.dtype != arithmetic.accumulate else 0.0
    error = stored(y.value, y.allowed + narrow * size, arithmetic)
    sizes = apart + size
    return bounded(y.value, error, sizes, x.shape[1], y.derivation)


def log_softmax_grad(x: torch.Tensor, cotangent: torch.Tensor, arithmetic: Arithmetic) -> Bounded:
    """g - p sum g, (K, R), p from the stored y."""
    y, num = log_softmax(x, arithmetic), x.shape[1]
    if num == 1:
        return Bounded(torch.zeros_like(x), torch.zeros_like(x), _ALONE)
    p = y.value.exp()
    e_p = exp_error(p, y.allowed, arithmetic)
    shift, magnitude = cotangent.sum(1, keepdim=True), cotangent.abs().sum(1, keepdim=True)
    e_shift = gamma(num, arithmetic.u_a) * magnitude
    e_shift = stored(shift, e_shift, arithmetic)
    error = (p + e_p) * e_shift + e_p * shift.abs()
    error = error + 2 * arithmetic.u_a * (cotangent.abs() + (p + e_p) * (shift.abs() + e_shift))
    value = cotangent - p * shift
    sizes = cotangent.abs() + p * magnitude * (1 + y.value.abs())
    return bounded(value, store(value, error, arithmetic), sizes, num, f"{y.derivation}, its exp and of sum g")
