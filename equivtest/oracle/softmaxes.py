"""Bounds log_softmax, forward and backward, by a kernel that sees whole rows.

Letters: rows x (K, R) of R terms each, g the cotangent (K, R); y and l as in `equivtest.oracle.losses`, p = exp y.

    grad = g - p sum g

Derived here.  `equivtest.oracle.losses` derives the error of y.  The gradient is computed from the stored y.  In 16
bits torch's CPU kernels store more intermediate results: the sum of the exponentials, its logarithm, and the sum of g.
The kernels subtract the maximum from x first, so a large number that is added to all terms of a row does not matter.

Source: vec_log_softmax_lastdim_chunk_kernel in ATen/native/cpu/SoftMaxKernel.cpp (2.13.0); Higham, Accuracy and
Stability of Numerical Algorithms, 2nd ed., sections 3.1 and 4.2.
"""

from __future__ import annotations

import torch

from equivtest.oracle.losses import exp_error, log_of_sum, stored
from equivtest.oracle.rounding import Arithmetic, Bounded, bounded, gamma, growth, store

_ALONE = "equal: the softmax of one term is exp 0 over itself, and a cotangent minus itself is 0"


def log_softmax(x: torch.Tensor, arithmetic: Arithmetic) -> Bounded:
    """Returns y = log_softmax(x), of shape (K, R), for a kernel that may store the sum and its logarithm before y."""
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
    """Returns the gradient of log_softmax, which is g - p sum g with p = exp y. The result has the shape (K, R)."""
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
