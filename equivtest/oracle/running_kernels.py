"""Describes torch's 16-bit CPU kernels, which compute in a wider dtype, `Arithmetic.accumulate`, and store in 16 bits.

The oracle widens a kernel's operands and applies the rules of the wider dtype.  The result is stored once, or as often
as the kernel adds to it in the tensor's own dtype.  Each entry lists the intermediate results that the kernel stores.
A kernel without an entry may store every result in torch's decomposition, and may add in 16 bits.

Source: the files of ATen/native that the entries name; LogSoftmaxKernelImpl.h as torch 2.13.0 installs it.  `python -m
studies.bounded_ops` compares each entry with the results of torch 2.13.0; an entry without a file rests on that
comparison alone.

    products                cpu/BlasKernel.cpp, gemm_notrans_, gemm_transb_ and the like: sums of opmath_t, stored once
    softmax                 cpu/SoftMaxKernel.cpp: the tails of _vec_softmax store the exponentials as scalar_t;
                            cpu/LogSoftmaxKernelImpl.h: serial_vec_log_softmax_lastdim_range stores the sum of the
                            exponentials, then its logarithm, as scalar_t; backward, the sum is assumed to be stored
    layer norm              cpu/layer_norm_kernel.cpp: mean and rstd are stored as the weight is, and
                            layer_norm_backward_frame adds each row to the gradients of weight and bias as scalar_t
    losses                  LossNLL.cpp: nll_loss_out_frame adds sixteen at a time as scalar_t
    embeddings              cpu/BlasKernel.cpp: cpublas_axpy_impl adds a row as scalar_t
    attention               `equivtest.oracle.running_attention`
    pointwise functions     `equivtest.oracle.running_pointwise`
    others                  sums and means: computed in opmath_t, stored once; a squared difference is stored, squared
                            and stored again
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from equivtest.oracle.running_attention import attention, attention_backward
from equivtest.oracle.running_outs import Kernel, Out
from equivtest.oracle.running_pointwise import BACKWARD, FORWARD, MEAN, SUM

LEVEL = 16  # terms that a level of nll_loss_out_frame's cascade adds before it passes them on


Computes = Callable[..., Any]
"""Function of a `Kernel` and its widened operands that returns one `Out`, or a tuple of them."""


def _whole(kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
    found = kernel.func(*args, **kwargs)
    if isinstance(found, tuple):
        return tuple(Out(each, is_whole=True) for each in found)
    return Out(found, is_whole=True)


def _sum(kernel: Kernel, *args: Any, **kwargs: Any) -> Out:
    return Out(kernel.func(*args, **kwargs), is_sum=True)


def _sum_and_more(kernel: Kernel, *args: Any, **kwargs: Any) -> Out:
    """Computes a matrix product plus a third operand. The kernel stores the product, and then stores the sum.

    On several ranks, each rank may store its shares of the product and of the sum.
    """
    return Out(kernel.func(*args, **kwargs), stores=2, is_sum=True)


def _log_softmax(kernel: Kernel, x: torch.Tensor, dim: int, half_to_float: bool) -> Out:  # noqa: FBT001  (torch's own)
    apart = x - x.amax(dim, keepdim=True)
    total = kernel.stored(apart.exp().sum(dim, keepdim=True))
    return Out(apart - kernel.stored(total.log()), is_whole=True)


def _log_softmax_backward(kernel: Kernel, g: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype) -> Out:
    return Out(g - y.exp() * kernel.stored(g.sum(dim, keepdim=True)))


def _softmax(kernel: Kernel, x: torch.Tensor, dim: int, half_to_float: bool) -> Out:  # noqa: FBT001  (torch's own)
    """Computes a softmax. Unless `dim` is the last dim, the kernel stores the exponentials before it divides them."""
    return Out(
        kernel.func(x, dim, half_to_float), stores=1 if dim % max(x.dim(), 1) == x.dim() - 1 else 2, is_whole=True
    )


def _softmax_backward(kernel: Kernel, g: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype) -> Out:
    return Out((g - kernel.stored((g * y).sum(dim, keepdim=True))) * y)


def _layer_norm_backward(kernel: Kernel, g: torch.Tensor, x: torch.Tensor, shape: Any, *args: Any) -> tuple[Out, ...]:
    """Computes the gradients of layer norm. The kernel adds rows one by one to 16-bit gradients of weight and bias."""
    rows = max(g.numel() // max(math.prod(shape), 1), 1)
    dx, *others = kernel.func(g, x, shape, *args)
    return Out(dx), *(Out(each, stores=rows, one_by_one=True, is_sum=True, dtype=kernel.dtype) for each in others)


def _nll_loss(
    kernel: Kernel, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignored: int
) -> tuple[Out, Out]:
    """Returns (loss, sum of the weights). To get a mean, the kernel divides by the sum of the weights.

    The kernel adds the first term of each sum to zero, which rounds nothing.
    """
    loss, total = kernel.func(x, target, weight, reduction, ignored)
    added, num, weighted = 0, target.numel(), int(weight is not None)
    while num > 1 and reduction in (SUM, MEAN):
        added, num = added + min(num, LEVEL), math.ceil(num / LEVEL)
    counted = added if weighted else int(target.numel() > 2 / torch.finfo(kernel.dtype).eps)
    divided = (1 + counted) * int(reduction == MEAN)
    return Out(loss, max(added + weighted + divided, 1), is_sum=True), Out(total, max(counted, 1), is_sum=True)


def _nll_loss_backward(kernel: Kernel, *args: Any) -> Out:
    return Out(kernel.func(*args), stores=2)


def _squares(kernel: Kernel, x: torch.Tensor, y: torch.Tensor, reduction: int = MEAN) -> Out:
    """Computes mse_loss. The kernel stores the difference, then the square of the difference, then the sum."""
    return Out(kernel.func(x, y, reduction), stores=4, is_sum=True)


def _embedding_backward(
    kernel: Kernel,
    g: torch.Tensor,
    ids: torch.Tensor,
    rows: int,
    padding: int,
    by_frequency: bool,  # noqa: FBT001  (torch's own)
) -> Out:
    found = kernel.func(g, ids, rows, padding, by_frequency)
    times = torch.bincount(ids.flatten(), minlength=rows).clamp(min=1) + int(by_frequency)
    return Out(found, stores=times[:, None], one_by_one=not by_frequency, is_sum=True)


KERNELS: dict[str, Computes] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "sum", "mean", "cumsum", "linalg_vector_norm"), _sum),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _sum_and_more),
    **dict.fromkeys(
        (
            "elu", "glu", "hardsigmoid", "hardswish", "leaky_relu", "log_sigmoid_forward", "mish", "native_layer_norm",
            "sigmoid", "silu", "softshrink", "tanh", "var", "var_mean",
        ),
        _whole,
    ),
    **FORWARD,
    **BACKWARD,
    "_softmax": _softmax, "_log_softmax": _log_softmax, "_log_softmax_backward_data": _log_softmax_backward,
    "_softmax_backward_data": _softmax_backward, "native_layer_norm_backward": _layer_norm_backward,
    "nll_loss_forward": _nll_loss, "nll_loss_backward": _nll_loss_backward, "mse_loss": _squares,
    "embedding_dense_backward": _embedding_backward,
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
}  # fmt: skip
"""Operator -> function that computes its result, with the roundings of torch's kernel."""
