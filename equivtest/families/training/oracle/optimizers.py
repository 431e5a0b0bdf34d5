"""Bounds one step of SGD and of AdamW from the state before the step.

Kernels compute in the accumulate dtype and store each result once. A hyperparameter may be rounded to the storage dtype
before it is used. AdamW's results are enclosed in intervals, because its quotient is far from linear if the second
moment is near zero. First-order bounds do not hold for such a moment.

Source: torch/optim/sgd.py and torch/optim/adam.py (2.13.0), _single_tensor and _multi_tensor forms;
intervals: Moore, Kearfott and Cloud, Introduction to Interval Analysis, chapter 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from equivtest.oracle.rounding import (
    SLACK_TERMS,
    U_REFERENCE,
    Arithmetic,
    Bounded,
    Operand,
    bounded,
    error_of,
    growth,
    store,
    value_of,
    where_finite,
)


@dataclass(frozen=True)
class SgdOptions:
    """Arguments of torch.optim.SGD, without `maximize`."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True)
class AdamOptions:
    """Arguments of torch.optim.AdamW, without `maximize` and `amsgrad`.

    With amsgrad, the argument `moments` of `adamw_step` has one more tensor.
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2


def sgd_step(
    param: Operand, momentum_buffer: Operand | None, grad: Operand, options: SgdOptions, arithmetic: Arithmetic
) -> dict[str, Bounded]:
    """Returns 'param' and, with momentum, 'momentum_buffer' after one step. The first step gets no buffer."""
    step = grad
    if options.weight_decay:
        step = _sum_of(1.0, step, options.weight_decay, param, arithmetic)
    answers = {}
    if options.momentum:
        buffer = step
        if momentum_buffer is not None:
            buffer = _sum_of(1 - options.dampening, step, options.momentum, momentum_buffer, arithmetic, stored=2)
        answers["momentum_buffer"] = _as_bounded(buffer)
        step = _sum_of(1.0, step, options.momentum, buffer, arithmetic) if options.nesterov else buffer
    answers["param"] = _sum_of(1.0, param, -options.lr, step, arithmetic)
    return answers


def nesterov_step(
    param: Operand, momentum_buffer: Operand, grad: Operand, options: SgdOptions, arithmetic: Arithmetic
) -> Bounded:
    """Returns the parameter after one step with Nesterov's momentum. `momentum_buffer` is from after the step."""
    step = grad
    if options.weight_decay:
        step = _sum_of(1.0, step, options.weight_decay, param, arithmetic)
    step = _sum_of(1.0, step, options.momentum, momentum_buffer, arithmetic)
    return _sum_of(1.0, param, -options.lr, step, arithmetic)


def _sum_of(
    left_factor: float, left: Operand, factor: float, right: Operand, arithmetic: Arithmetic, *, stored: int = 1
) -> Bounded:
    """Returns left_factor * left + factor * right with its bound.

    One rounding is counted for each factor, for each product and for the stored sum. If `stored` is 2, the right
    product has one more rounding, because a kernel stores it separately.
    """
    a, b, e_a, e_b = value_of(left), value_of(right), error_of(left), error_of(right)
    terms_a, terms_b = abs(left_factor) * (a.abs() + e_a), abs(factor) * (b.abs() + e_b)
    value = left_factor * a + factor * b
    error = abs(left_factor) * e_a + abs(factor) * e_b
    error = error + growth((1 + stored, arithmetic.u_o)) * terms_b + stored * arithmetic.eta * (terms_b != 0).double()
    if left_factor != 1.0:
        error = error + growth((2, arithmetic.u_o)) * terms_a + arithmetic.eta * (terms_a != 0).double()
    error = store(value, error, arithmetic)
    derivation = f"{1 + stored} roundings of {arithmetic.dtype} of the scaled term and 1 of the sum"
    return bounded(value, error, terms_a + terms_b, 2, derivation)


def _as_bounded(operand: Operand) -> Bounded:
    if isinstance(operand, Bounded):
        return operand
    return Bounded(value_of(operand), error_of(operand), "equal: a copy of the gradient")


@dataclass(frozen=True)
class Interval:
    """An interval for each element, low <= number <= high, in float64."""

    low: torch.Tensor
    high: torch.Tensor

    @classmethod
    def of(cls, operand: Operand) -> Interval:
        value, error = value_of(operand), error_of(operand)
        return cls(value - error, value + error)

    def widened(self, relative: float, underflow: float) -> Interval:
        """Returns the interval, widened by `relative` times its ends and by `underflow`.

        Elements that are certainly zero stay zero. The roundings of this float64 evaluation are included.
        """
        relative += SLACK_TERMS * U_REFERENCE
        absolute = ((self.low != 0) | (self.high != 0)).double() * underflow  # zero does not underflow
        return Interval(
            self.low - relative * self.low.abs() - absolute, self.high + relative * self.high.abs() + absolute
        )

    def times(self, factor: float) -> Interval:
        ends = self.low * factor, self.high * factor
        return Interval(torch.minimum(*ends), torch.maximum(*ends))

    def plus(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.high + other.high)

    def larger(self, other: Interval) -> Interval:
        """Returns an interval for the maximum of two numbers, one from each interval."""
        return Interval(torch.maximum(self.low, other.low), torch.maximum(self.high, other.high))

    def over(self, other: Interval) -> Interval:
        """Returns the quotient by a positive interval. It is unbounded where `other` may contain zero."""
        corners = torch.stack([a / b for a in (self.low, self.high) for b in (other.low, other.high)])
        lost = other.low <= 0
        low = torch.where(lost, -torch.inf, corners.amin(0))
        return Interval(low, torch.where(lost, torch.inf, corners.amax(0)))


def adamw_step(
    param: Operand,
    moments: Sequence[Operand],
    grad: Operand,
    num_steps: int,
    options: AdamOptions,
    arithmetic: Arithmetic,
) -> dict[str, Bounded]:
    """Returns 'param', 'exp_avg', 'exp_avg_sq' and with amsgrad 'max_exp_avg_sq' after one step of AdamW, with bounds.

    Args:
        moments: 'exp_avg' and 'exp_avg_sq' before the step. With amsgrad also 'max_exp_avg_sq', whose root then divides
            the step instead of the root of 'exp_avg_sq'.
        num_steps: Number of steps including this step, the exponent of the bias corrections.
    """
    u_o, u_a, eta = arithmetic.u_o, arithmetic.u_a, arithmetic.eta
    exp_avg, exp_avg_sq, *largest = moments
    right = _adamw_exact(value_of(param), list(map(value_of, moments)), value_of(grad), num_steps, options)
    first = _first_moment(exp_avg, grad, options, arithmetic)
    second = _second_moment(exp_avg_sq, grad, options, arithmetic)

    # a second moment that overflows is infinite, or finite if more bits hold it until it is stored
    reach = torch.maximum(Interval.of(grad).low.abs(), Interval.of(grad).high.abs()) ** 2
    overflows = (second.high > arithmetic.largest) | (reach > arithmetic.largest_a)
    second = Interval(second.low, torch.where(overflows, torch.inf, second.high))
    divisor = second.larger(Interval.of(largest[0])) if largest else second

    # sqrt stored, divided by a rounded factor and stored, a rounded eps added and stored
    root = Interval(divisor.low.clamp(min=0).sqrt(), divisor.high.sqrt())
    root = root.widened(growth((3, u_o), (int(2 * arithmetic.libm_ulp) + 2, u_a)), 2 * eta)
    root = root.times((1 - options.beta2**num_steps) ** -0.5)
    eps = Interval(*(torch.full_like(root.low, options.eps),) * 2).widened(u_o, eta)
    denominator = root.plus(eps).widened(growth((1, u_o)), eta)

    step = first.over(denominator).times(-options.lr / (1 - options.beta1**num_steps))
    step = step.widened(growth((2, u_o), (4, u_a)), arithmetic.eta_a)
    decayed = Interval.of(param).times(1 - options.lr * options.weight_decay).widened(growth((2, u_o)), eta)
    moved = decayed.plus(step).widened(growth((1, u_o), (2, u_a)), eta)
    enclosed = {"param": moved, "exp_avg": first, "exp_avg_sq": second}
    enclosed |= {"max_exp_avg_sq": divisor} if largest else {}
    return {name: _enclosed(right[name], interval, arithmetic) for name, interval in enclosed.items()}


def _adamw_exact(
    param: torch.Tensor, moments: Sequence[torch.Tensor], grad: torch.Tensor, num_steps: int, options: AdamOptions
) -> dict[str, torch.Tensor]:
    exp_avg, exp_avg_sq, *largest = moments
    first = options.beta1 * exp_avg + (1 - options.beta1) * grad
    second = options.beta2 * exp_avg_sq + (1 - options.beta2) * grad**2
    divisor = torch.maximum(second, largest[0]) if largest else second
    denominator = (divisor / (1 - options.beta2**num_steps)).sqrt() + options.eps
    step = options.lr / (1 - options.beta1**num_steps) * first / denominator
    moved = param * (1 - options.lr * options.weight_decay) - step
    return {"param": moved, "exp_avg": first, "exp_avg_sq": second, "max_exp_avg_sq": divisor}


def _first_moment(exp_avg: Operand, grad: Operand, options: AdamOptions, arithmetic: Arithmetic) -> Interval:
    """Encloses AdamW's first moment after the step, which torch computes by lerp.

    With m = `exp_avg` and g = `grad`, torch computes m + (1 - beta1)(g - m) if beta1 > 0.5, and g - beta1 (g - m) if
    not. The terms may cancel.
    """
    m, g = Interval.of(exp_avg), Interval.of(grad)
    size_m, size_g = (torch.maximum(i.low.abs(), i.high.abs()) for i in (m, g))
    near, weight = (size_m, 1 - options.beta1) if options.beta1 > 0.5 else (size_g, options.beta1)
    moved = weight * (size_m + size_g)  # of the difference, stored separately at worst
    error = growth((5, arithmetic.u_a)) * (near + moved) + arithmetic.u_o * moved
    mixed = m.times(options.beta1).plus(g.times(1 - options.beta1))
    mixed = Interval(mixed.low - error, mixed.high + error)
    return mixed.widened(growth((1, arithmetic.u_o)), arithmetic.eta + arithmetic.eta_a)


def _second_moment(exp_avg_sq: Operand, grad: Operand, options: AdamOptions, arithmetic: Arithmetic) -> Interval:
    """Encloses beta2 v + (1 - beta2) g g, AdamW's second moment, with v = `exp_avg_sq` and g = `grad`.

    The left product has two roundings, and the right product has three. Both products and their sum are stored.
    """
    v, g = Interval.of(exp_avg_sq), Interval.of(grad)
    squares = torch.stack([g.low**2, g.high**2])
    crosses = (g.low <= 0) & (g.high >= 0)
    squared = Interval(torch.where(crosses, 0.0, squares.amin(0)), squares.amax(0))
    old = v.times(options.beta2).widened(growth((2, arithmetic.u_o)), arithmetic.eta)
    new = squared.times(1 - options.beta2).widened(growth((1, arithmetic.u_o), (3, arithmetic.u_a)), arithmetic.eta_a)
    mixed = old.plus(new).widened(growth((1, arithmetic.u_o), (1, arithmetic.u_a)), arithmetic.eta)
    return Interval(mixed.low.clamp(min=0), mixed.high)


def _enclosed(right: torch.Tensor, interval: Interval, arithmetic: Arithmetic) -> Bounded:
    allowed = torch.maximum(interval.high - right, right - interval.low)
    allowed = where_finite(right.abs() + allowed, arithmetic.largest, allowed)
    derivation = f"interval enclosure, every kernel stored once in {arithmetic.dtype}"
    return Bounded(right, allowed, derivation)
