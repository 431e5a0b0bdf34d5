"""Pointwise functions and their gradients as torch's CPU kernels compute them in 16 bits: entries of `running_kernels`.

Each function here shows which results its kernel stores in 16 bits:

    the last result    elu, gelu, hardsigmoid, hardswish, leaky_relu, mish, prelu, rrelu, silu, smooth_l1_loss,
                       softplus and tanh; sigmoid in bfloat16
    no result          hardtanh, which rounds nothing: the gradient passes or becomes zero
    each result        sigmoid in float16; in both dtypes logit, huber_loss, mse_loss, binary_cross_entropy and
                       soft_margin_loss
    an operand         glu and log_sigmoid: the sigmoid, or exp(-|x|), is stored before the next kernel

If a kernel stores each result, it also stores numbers such as a limit or 1 / n.

Letters: x the input of a function, y its output, g the gradient of the output; n the number of elements that a mean
averages, 1 without a mean.

Source: ATen/native/cpu/Activation.cpp, BinaryOpsKernel.cpp and PointwiseOpsKernel.cpp, GatedLinearUnit.cpp and Loss.cpp
in ATen/native, of torch's main branch.  `python -m studies.bounded_ops` compares each bound with the results of torch
2.13.0 on every number of the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from equivtest.oracle.ranged import Parts
from equivtest.oracle.running_outs import Kernel, Out
from equivtest.oracle.running_rules import is_near

SUM, MEAN = 2, 1  # torch's numbers for reductions


def of_gradient(kernel: Kernel, g: torch.Tensor, *args: Any, **kwargs: Any) -> Out:
    """Computes the product of a gradient and a factor that does not depend on any gradient.

    The kernel stores only the product.
    """
    slope = kernel.func(torch.ones_like(g), *args, **kwargs)
    return Out(kernel.func(g, *args, **kwargs), factors=(g, slope))


def _passed(kernel: Kernel, g: torch.Tensor, *args: Any, **kwargs: Any) -> Out:
    return Out(kernel.func(g, *args, **kwargs), stores=0)


def _number(kernel: Kernel, number: float) -> torch.Tensor:
    with _disable_current_modes():
        plain = torch.tensor(number)
        has_it = float(plain.to(kernel.dtype)) == number
    return plain if has_it else kernel.stored(plain)


def _product(g: torch.Tensor, slope: torch.Tensor) -> Out:
    return Out(g * slope, factors=(g, slope))


def _sigmoid(kernel: Kernel, g: torch.Tensor, y: torch.Tensor) -> Out:
    """Computes the gradient of sigmoid, (g (1 - y)) y.

    torch's kernel sigmoid_backward_kernel computes in float32 only for bfloat16.
    """
    if kernel.dtype != torch.float16:
        return of_gradient(kernel, g, y)
    return Out(kernel.stored_shares(g * kernel.stored(1 - y)) * y)


def _logit(kernel: Kernel, g: torch.Tensor, x: torch.Tensor, eps: float | None = None) -> Out:
    """Computes logit's gradient.

    The gradient is g / (x (1 - x)) if x lies between eps and 1 - eps, and zero if x lies outside. The kernel stores
    both limits.
    """
    inner = g / kernel.stored(x * kernel.stored(1 - x))
    beside = torch.zeros_like(g) if eps is not None else torch.full_like(g, torch.nan)
    low = _number(kernel, eps or 0.0)
    return Out(_branch(-x, -low, beside, _branch(x, kernel.stored(1 - low), beside, inner)))


def _branch(x: torch.Tensor, limit: Any, above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """Returns `above` for elements of x that are larger than a limit, and `below` for all other elements.

    If the order is uncertain, the error allows both.
    """
    with _disable_current_modes():
        a, border, one, two = map(Parts.of, (x, limit, above, below))
        is_above = a.value > border.value.to(a.value.dtype)
        unclear = is_near(a, float(border.value), float(border.error))
        apart = torch.where(unclear, (one.value.double() - two.value.double()).abs(), 0.0)
        value, error = torch.where(is_above, one.value, two.value), torch.where(is_above, one.error, two.error) + apart
        return Parts(value, error, torch.where(is_above, one.magnitude, two.magnitude) + apart).wrapped()


def _glu(kernel: Kernel, g: torch.Tensor, x: torch.Tensor, dim: int) -> Out:
    """Computes the gradient of glu. The kernel stores the sigmoid, and computes the gradient of the gate from it."""
    left, right = x.chunk(2, dim)
    gate = kernel.stored(right.sigmoid())
    return _product(torch.cat([g, g], dim), torch.cat([gate, (1 - gate) * gate * left], dim))


def _prelu(kernel: Kernel, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[Out, Out]:
    is_above = x > 0
    return _product(g, torch.where(is_above, 1.0, weight)), _product(g, torch.where(is_above, 0.0, x))


def _mean_of(kernel: Kernel, x: torch.Tensor, reduction: int) -> Any:
    return _number(kernel, 1 / max(x.numel(), 1)) if reduction == MEAN else 1.0


def _mse(kernel: Kernel, g: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int) -> Out:
    """Computes mse_loss's gradient as ((2 / n) (x - target)) g."""
    factor = _number(kernel, 2 / max(x.numel(), 1)) if reduction == MEAN else 2.0
    return _product(g, kernel.stored(factor * kernel.stored(x - target)))


def _clamped(x: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    return torch.maximum(torch.minimum(x, limit), -limit)


def _huber(kernel: Kernel, g: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int, delta: float) -> Out:
    """Computes huber_loss's gradient as (1 / n) d g, with d = x - target, clamped to -delta..delta.

    If d is outside of this range, torch's vectorized code multiplies in another order than its scalar code.
    """
    d = _clamped(kernel.stored(x - target), _number(kernel, delta))
    factor = _mean_of(kernel, x, reduction)
    return Out(kernel.stored_shares(g * kernel.stored(factor * d)))


def _huber_loss(
    kernel: Kernel, x: torch.Tensor, target: torch.Tensor, reduction: int = MEAN, delta: float = 1.0
) -> Out:
    """Computes huber_loss as a (z - a / 2), with z = |x - target| and a = min(z, delta)."""
    z = kernel.stored((x - target).abs())
    a = torch.minimum(z, _number(kernel, delta))
    return _reduced(kernel, a * kernel.stored(z - a / 2), reduction)


def _smooth_l1(
    kernel: Kernel, g: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> Out:
    """Computes smooth_l1_loss's gradient as (1 / n) g d / beta, with d = x - target, clamped to -beta..beta."""
    slope = _clamped((x - target) / beta, torch.ones(())) if beta else (x - target).sign()
    return _product(g, slope / max(x.numel(), 1) if reduction == MEAN else slope)


def _smooth_l1_loss(
    kernel: Kernel, x: torch.Tensor, target: torch.Tensor, reduction: int = MEAN, beta: float = 1.0
) -> Out:
    """Computes smooth_l1_loss as (a (z - a / 2)) / beta, with z = |x - target| and a = min(z, beta).

    In float16 the kernel stores each result.
    """
    stored = kernel.stored if kernel.dtype == torch.float16 else lambda result: result
    z = stored((x - target).abs())
    limit = _number(kernel, beta)
    a = torch.minimum(z, limit)
    return _reduced(kernel, stored(a * stored(z - a / 2)) / limit if beta else z, reduction)


def _reduced(kernel: Kernel, losses: torch.Tensor, reduction: int) -> Out:
    """Returns the losses, their sum or their mean, depending on `reduction`.

    Before a sum or a mean, the kernel rounds each loss to the dtype of the result.  It adds the rounded losses in a
    wider dtype.
    """
    if reduction not in (SUM, MEAN):
        return Out(losses, is_whole=True)
    held = kernel.stored(losses)
    return Out(held.mean() if reduction == MEAN else held.sum(), is_sum=True)


def _softplus(kernel: Kernel, x: torch.Tensor, beta: float = 1.0, threshold: float = 20.0) -> Out:
    """Computes softplus as log1p(exp(beta x)) / beta, or as x if beta x is above the threshold."""
    z = x * beta
    return Out(_branch(z, threshold, x, z.exp().log1p() / beta), is_whole=True)


def _softplus_backward(kernel: Kernel, g: torch.Tensor, x: torch.Tensor, beta: float, threshold: float) -> Out:
    z = x * beta
    return _product(g, _branch(z, threshold, torch.ones_like(x), z.sigmoid()))


def _gelu(kernel: Kernel, x: torch.Tensor, *, approximate: str = "none") -> Out:
    """Computes gelu as (x (1 + erf(x / sqrt(2)))) / 2, or the variant of gelu with tanh.

    Source: gelu_out_cpu of ATen/native/Activation.cpp (2.13.0): in bfloat16 it calls oneDNN. oneDNN doubles large
    numbers before it halves them, and may store zero in place of a subnormal number.
    """
    if approximate != "none":
        return Out(kernel.func(x, approximate=approximate), is_whole=True)
    result = x * (1 + (x * math.sqrt(0.5)).erf()) * 0.5
    return Out(result, is_whole=True, flushes=kernel.dtype == torch.bfloat16)


def _binary_cross_entropy(
    kernel: Kernel,
    g: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
) -> Out:
    """Computes the gradient (g (x - target)) / max((1 - x) x, 1e-12) of binary_cross_entropy.

    The kernel then multiplies by the weight and divides by n.  It stores each result, and also the number 1e-12.
    """
    least = _number(kernel, 1e-12)
    divisor = torch.maximum(kernel.stored(kernel.stored(1 - x) * x), least)
    gradient = kernel.stored_shares(g * kernel.stored(x - target)) / divisor
    if weight is not None:
        gradient = kernel.stored_shares(gradient) * weight
    return Out(kernel.stored_shares(gradient) / x.numel() if reduction == MEAN else gradient)


def _soft_margin(kernel: Kernel, g: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int = MEAN) -> Out:
    """Computes soft_margin_loss's gradient as (((t z) (-1 / n)) / (z + 1)) g, with t the target and z = exp(-t x).

    torch runs one operation after the other, and each stores its result.
    """
    z = kernel.stored(kernel.stored(-target * x).exp())
    scaled = kernel.stored(kernel.stored(target * z) * -_mean_of(kernel, x, reduction))
    return _product(g, kernel.stored(scaled / kernel.stored(z + 1)))


BACKWARD: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            "elu_backward", "gelu_backward", "hardsigmoid_backward", "hardswish_backward", "leaky_relu_backward",
            "log_sigmoid_backward", "mish_backward", "rrelu_with_noise_backward", "silu_backward", "tanh_backward",
        ),
        of_gradient,
    ),
    "_prelu_kernel_backward": _prelu,
    "binary_cross_entropy_backward": _binary_cross_entropy,
    "glu_backward": _glu,
    "hardtanh_backward": _passed,
    "huber_loss_backward": _huber,
    "logit_backward": _logit,
    "mse_loss_backward": _mse,
    "sigmoid_backward": _sigmoid,
    "smooth_l1_loss_backward": _smooth_l1,
    "soft_margin_loss_backward": _soft_margin,
    "softplus_backward": _softplus_backward,
}  # fmt: skip
"""Operator of a gradient -> function for `running_kernels.KERNELS`."""

FORWARD: dict[str, Callable[..., Any]] = {
    "gelu": _gelu,
    "huber_loss": _huber_loss,
    "smooth_l1_loss": _smooth_l1_loss,
    "softplus": _softplus,
}
"""Operator -> function for `running_kernels.KERNELS`, for operators that do more than round their result once."""
