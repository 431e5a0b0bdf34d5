"""Bounds log_softmax and the negative log likelihood, forward and backward, over sharded classes.

Letters: P positions, C classes, w ranks; x (P, C) logits, m = max x, d = x - m, s = sum exp d,
l = log s, y = d - l the logarithm of the softmax, p = exp y; t the target of a position, W its
weight, g the cotangent; u the roundoff of accumulation, f the error of exp and log in ulp.

    loss = -W y_t        grad.x = (p - onehot t) W g        mean: both over the sum of all W

Derived here. m is exact. d is off by u |d|. So exp d has a relative error of expm1(u |d|), and of 2 f u from exp
itself. If exp d underflows, its error is at most the smallest normal number. s is a sum of C terms, and a collective
adds w parts of this sum, so the error is gamma(C + w) s. If s has a relative error e, l is off by -log1p(-e), and by 2
f u |l| from log itself. y is rounded once more, and stored. p = exp y has a relative error of expm1 of y's error. In 16
bits the stored y is off by u_o |y|, so p is off by far more than one rounding. All other errors are single roundings of
storage, and the errors of one sum over positions.

If the exponentials of a row, except that of the maximum, add up to less than 2**-80, they do not change s.  Then
exp 0 = 1 and log 1 = 0 are exact, and so is each later result that the dtype can represent: see `rounded`.

Source: _log_softmax, _nll_loss_forward and _nll_loss_and_log_softmax_backward in
torch/distributed/tensor/parallel/loss.py (2.13.0): the maximum is subtracted first, maximum and sum
are reduced in the accumulator's dtype, y is stored; C11, F.10.3.1 and F.10.3.7, for exp 0 and
log 1; Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., sections 2.2 and 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from equivtest.oracle.exact import InexactData, find_integers, sum_terms
from equivtest.oracle.rounding import Arithmetic, Bounded, bounded, gamma, store, unit_roundoff
from equivtest.tensors import DTYPES

_NOTHING = 2.0**-80  # next to 1, for any order of a sum and any error of float64's own exp


@dataclass(frozen=True)
class Targets:
    """Classes, weights and mask of the positions of a loss.

    Attributes:
        classes: Target class of each position, an int64 tensor of shape (P,). An ignored position has a valid class
            too.
        kept: Mask of shape (P,). It is False for ignored positions.
        weight: Weight of each position's target class, a float64 tensor of shape (P,). If the loss has no weights, all
            elements are 1.
        has_weight: True if a program multiplies by weights.
    """

    classes: torch.Tensor
    kept: torch.Tensor
    weight: torch.Tensor
    has_weight: bool


def log_softmax(x: torch.Tensor, arithmetic: Arithmetic, *, ranks: int) -> Bounded:
    """Returns y, the stored logarithm of the softmax of x. Both tensors have the shape (P, C)."""
    y = log_of_sum(x, arithmetic, ranks=ranks)
    return Bounded(y.value, stored(y.value, y.allowed, arithmetic), y.derivation)


def log_of_sum(x: torch.Tensor, arithmetic: Arithmetic, *, ranks: int) -> Bounded:
    """Returns y, the logarithm of the softmax of x, before y is stored. The bound is that of y in an accumulator."""
    x, u, f = x.double(), arithmetic.u_a, arithmetic.libm_ulp
    peak = x.argmax(1, keepdim=True)
    apart = x - x.gather(1, peak)  # d
    e_apart = _rounded(apart, torch.zeros_like(apart), arithmetic.accumulate)
    others = apart.exp().scatter(1, peak, 0.0)
    e_others = exp_error(others, e_apart, arithmetic) * (others != 0)
    rest, e_rest = others.sum(1, keepdim=True), e_others.sum(1, keepdim=True)
    total = 1 + rest  # s
    relative = (e_rest + gamma(x.shape[1] + ranks, u) * (total + e_rest)) / total
    log = rest.log1p()  # l
    e_log = -torch.log1p(-relative)
    e_log = e_log + 2 * f * u * (log + e_log)
    log, e_log = (torch.where(rest + e_rest < _NOTHING, 0.0, tensor) for tensor in (log, e_log))
    value = apart - log
    error = _rounded(value, e_apart + e_log, arithmetic.accumulate)
    derivation = f"gamma({x.shape[1]} + {ranks} roundings of {arithmetic.accumulate}) of the sum of exponentials"
    return sure(value, error, apart.abs() + log.abs() + 1, x.shape[1], derivation)


def nll(y: Bounded, targets: Targets, arithmetic: Arithmetic, reduction: str) -> Bounded:
    """Returns the loss from y, the logarithm of the softmax.

    The loss has the shape (P,) for the reduction 'none'. For any other reduction it is 0-dim. A mean over no positions
    is NaN.
    """
    at = targets.classes.unsqueeze(1)
    picked, error = -y.value.gather(1, at).squeeze(1), y.allowed.gather(1, at).squeeze(1)
    value = picked * targets.weight
    if targets.has_weight:
        error = rounded(value, error * targets.weight, arithmetic)
    value, error = (torch.where(targets.kept, tensor, 0.0) for tensor in (value, error))
    num = len(value)
    magnitude = (value.abs() + error).sum() if reduction != "none" else value.abs()
    if reduction != "none":
        value, error = _sum(value, error, arithmetic)
    if reduction == "mean":
        total, e_total = sum_of_weights(targets, arithmetic)
        value, magnitude = value / total, magnitude / total
        error = rounded(value, (error + value.abs() * e_total) / (total - e_total), arithmetic)
    error = torch.where(value.isnan(), 0.0, error)
    return sure(value, error, magnitude, num, f"{y.derivation}, stored in {arithmetic.dtype}, {reduction} over {num}")


def nll_grad(y: Bounded, targets: Targets, cotangent: torch.Tensor, arithmetic: Arithmetic, reduction: str) -> Bounded:
    """Returns the gradient of the logits, (P, C), from y, the logarithm of the softmax.

    `cotangent` has the shape (P,) for the reduction 'none'. For any other reduction it is 0-dim.
    """
    cotangents = cotangent.double().expand(len(targets.classes))
    e_given = torch.zeros_like(cotangents)
    if reduction == "mean":
        total, e_total = sum_of_weights(targets, arithmetic)
        cotangents = cotangents / total
        e_given = rounded(cotangents, cotangents.abs() * e_total / (total - e_total), arithmetic)
    if targets.has_weight:
        cotangents, e_given = cotangents * targets.weight, e_given * targets.weight
        e_given = rounded(cotangents, e_given, arithmetic)
    cotangents, e_given = (torch.where(targets.kept, tensor, 0.0).unsqueeze(1) for tensor in (cotangents, e_given))
    p, e_p = _softmax(y, arithmetic)
    hits = torch.zeros_like(p).scatter(1, targets.classes.unsqueeze(1), 1.0)
    vanishes = (hits == 1) & (p < _NOTHING) & (e_p < arithmetic.u_o / 4)  # next to 1, to which p - 1 rounds
    p, e_p = (torch.where(vanishes, 0.0, tensor) for tensor in (p, e_p))
    apart = p - hits
    e_apart = rounded(apart, e_p, arithmetic)
    value = apart * cotangents
    error = rounded(value, e_apart * (cotangents.abs() + e_given) + apart.abs() * e_given, arithmetic)
    error = torch.where(targets.kept.unsqueeze(1), error, 0.0)
    magnitude = (p * (1 + y.value.abs()) + hits) * cotangents.abs()
    return sure(value, error, magnitude, p.shape[1], f"{y.derivation}, its exp and 4 roundings of {arithmetic.dtype}")


def _softmax(y: Bounded, arithmetic: Arithmetic) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the stored p = exp y, and the error of p."""
    p = y.value.exp()
    error = torch.where((y.value == 0) & (y.allowed == 0), 0.0, exp_error(p, y.allowed, arithmetic))
    return p, stored(p, error, arithmetic)


def rounded(value: torch.Tensor, error: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    """Bounds the error after one operation has stored its result.

    The bound is 0 for each element whose operands had no error, if the dtype can represent the right result.

    Args:
        value: The right result.
        error: Error of the result that comes from the errors of the operands.
    """
    return torch.where(_is_exact(value, error, arithmetic.dtype), 0.0, store(value, error, arithmetic))


def _rounded(value: torch.Tensor, error: torch.Tensor, dtype: str) -> torch.Tensor:
    u = unit_roundoff(dtype)
    found = error + u * (value.abs() + error) + float(torch.finfo(DTYPES[dtype]).tiny)
    return torch.where(_is_exact(value, error, dtype), 0.0, found)


def stored(value: torch.Tensor, error: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    """Bounds the error of a result after a kernel stored it, if the accumulator of the kernel was off by `error`.

    The bound is `error` if tensors and accumulators have the same dtype.  Otherwise storing rounds: see `rounded`.
    """
    return error if arithmetic.dtype == arithmetic.accumulate else rounded(value, error, arithmetic)


def _is_exact(value: torch.Tensor, error: torch.Tensor, dtype: str) -> torch.Tensor:
    return (error == 0) & (value.to(DTYPES[dtype]).double() == value)


def exp_error(value: torch.Tensor, error: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    """Bounds the error of an exponential. Its right value is `value`, and its argument is off by `error`."""
    moved = value * error.expm1()
    smallest = float(torch.finfo(DTYPES[arithmetic.accumulate]).tiny)
    return moved + 2 * arithmetic.libm_ulp * arithmetic.u_a * (value + moved) + smallest


def _sum(value: torch.Tensor, error: torch.Tensor, arithmetic: Arithmetic) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (sum, error): the stored sum of `value` (P,) and the error of this sum. Both are 0-dim."""
    total, brought = value.sum(), error.sum()
    if not bool(brought == 0) or not _adds_exactly(value, DTYPES[arithmetic.accumulate]):
        brought = brought + gamma(len(value), arithmetic.u_a) * (value.abs().sum() + brought)
    return total, rounded(total, brought, arithmetic)


def sum_of_weights(targets: Targets, arithmetic: Arithmetic) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (stored divisor of a mean, its error). The divisor adds up weights, or counts positions that count."""
    weights = torch.where(targets.kept, targets.weight, 0.0)
    return _sum(weights, torch.zeros_like(weights), arithmetic)


def _adds_exactly(terms: torch.Tensor, dtype: torch.dtype) -> bool:
    try:
        sum_terms("sum", find_integers("terms", terms.unsqueeze(1)), dtype)
    except InexactData:
        return False
    return True


def sure(value: torch.Tensor, error: torch.Tensor, magnitude: torch.Tensor, num_terms: int, derivation: str) -> Bounded:
    """Returns a result with its bound.

    The bound is 0 for each element whose `error` is 0. For every other element, `bounded` computes the bound.

    Nothing rounds an element with an error of 0, neither in the oracle nor in a correct program.
    """
    found = bounded(value, error, magnitude, num_terms, derivation)
    return Bounded(value, torch.where(error == 0, 0.0, found.allowed), derivation)
