"""Rules of operations on windows of an image, a line or a volume: convolutions, pools, padding, upsampling.

For each element of its result, a convolution adds one product for each element of a window, in all channels of a group.
Its gradients are products of the cotangent with the weight, and with the elements of the windows. These products are
bilinear, and bounded like a matrix product (`equivtest.oracle.running_rules`). Means over windows, and the gradients of
pools, padding and upsampling, are linear with coefficients that are not negative. So the same operations, applied to
errors and to magnitudes, bound the errors and the magnitudes.

The bounds hold for sums of products in any order. They do not hold for algorithms that add operands before they
multiply, such as Winograd's and Fourier's. A library of a device may choose such an algorithm, whose errors depend on
other elements.

Source: aten::convolution, aten::convolution_backward and the pools of native_functions.yaml (torch 2.13.0).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from equivtest.oracle.ranged import Parts, Ranged
from equivtest.oracle.running_roundings import Roundings, partial_sums
from equivtest.oracle.running_rules import add

aten = torch.ops.aten
Sizes = Sequence[int]
Bilinear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def bilinear(r: Roundings, f: Bilinear, left: Any, right: Any, num: int) -> Parts:
    """Computes `f`. Each element of the result is a sum of `num` products."""
    a, b = Parts.of(left), Parts.of(right)
    error = f(a.error, b.reach) + f(a.size, b.error)
    return r.summed(f(a.value, b.value), error, f(a.magnitude, b.magnitude), num)


def convolution(
    r: Roundings, x: Any, weight: Any, bias: Any, stride: Sizes, padding: Sizes, dilation: Sizes,
    transposed: bool, output_padding: Sizes, groups: int,  # noqa: FBT001  (torch's own order)
) -> Parts:  # fmt: skip
    """Computes a convolution of N images of C channels to N images of K channels.

    x has the shape (N, C, ...), and the weight has the shape (K, C / groups, *window). The bias has the shape (K,), or
    is None.

    If `transposed` is True, the weight has the shape (C, K / groups, *window).
    """

    def product(image: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        return aten.convolution(  # type: ignore[no-any-return]
            image, kernel, None, stride, padding, dilation, transposed, output_padding, groups
        )

    num = (x.shape[-1 - len(stride)] // groups) * math.prod(weight.shape[2:])
    product_sum = bilinear(r, product, x, weight, num)
    if bias is None:
        return product_sum
    over_channels = Parts(*(part.reshape(-1, *[1] * len(stride)) for part in Parts.of(bias)))
    return add(r, product_sum.wrapped(), over_channels.wrapped(), num=num)


def convolution_backward(
    r: Roundings, cotangent: Any, x: Any, weight: Any, bias_sizes: Sizes | None, stride: Sizes, padding: Sizes,
    dilation: Sizes, transposed: bool, output_padding: Sizes, groups: int, wanted: Sequence[bool],  # noqa: FBT001
) -> tuple[Parts | None, ...]:  # fmt: skip
    def gradient(place: int) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        mask = [place == each for each in range(3)]
        return lambda g, image, kernel: aten.convolution_backward(
            g, image, kernel, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask
        )[place]

    of_x, of_weight, likes = gradient(0), gradient(1), (Parts.of(x).value, Parts.of(weight).value)
    image, kernel = (torch.zeros_like(each, dtype=torch.float64) for each in likes)
    channels = 1 if transposed else 0  # of the weight, whose other dim is divided by the groups
    num_out = weight.shape[channels] * (groups if transposed else 1)
    num_x = num_out // groups * math.prod(weight.shape[2:])
    num_seen = math.prod(cotangent.shape[2:]) * cotangent.shape[0]
    if transposed:  # the windows lie in the cotangent, one for each element of x
        num_seen = math.prod(x.shape[2:]) * x.shape[0]
    gradients: list[Parts | None] = [None, None, None]
    if wanted[0]:
        gradients[0] = bilinear(r, lambda g, w: of_x(g, image.to(g.dtype), w), cotangent, weight, num_x)
    if wanted[1]:
        gradients[1] = bilinear(r, lambda g, seen: of_weight(g, seen, kernel.to(g.dtype)), cotangent, x, num_seen)
    if wanted[2]:
        g = Parts.of(cotangent)
        dims = [dim for dim in range(g.value.dim()) if dim != 1]
        value, error, magnitude = (part.sum(dims) for part in g)
        gradients[2] = r.summed(value, error, magnitude, math.prod(g.value.shape[dim] for dim in dims))
    return tuple(gradients)


def constant_pad_nd(r: Roundings, operand: Any, pad: Sizes, value: float = 0) -> Parts:
    numbers = (value, 0.0, abs(value))
    return Parts(
        *(aten.constant_pad_nd(part, pad, number) for part, number in zip(Parts.of(operand), numbers, strict=True))
    )


def linear(func: Callable[..., torch.Tensor], num: Callable[..., int]) -> Callable[..., Parts]:
    """Makes the rule of a function that is linear in its first operand, and adds at most num(operand, ...) terms."""

    def rule(r: Roundings, operand: Any, *args: Any, **how: Any) -> Parts:
        plain = [Parts.of(each).value if isinstance(each, Ranged) else each for each in args]
        of_sizes = [
            each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each for each in plain
        ]
        a = Parts.of(operand)
        value = func(a.value, *plain, **how)
        error, magnitude = (func(part, *of_sizes, **how) for part in (a.error, a.magnitude))
        count = num(a.value, *plain)
        return r.rounded(value, error, magnitude, count + 2, stores=count, added=partial_sums(value, magnitude))

    return rule


def _pooled(operand: torch.Tensor, kernel: Sizes, *how: Any) -> int:
    return math.prod(kernel)


def _pooled_back(cotangent: torch.Tensor, x: torch.Tensor, kernel: Sizes, stride: Sizes, *how: Any) -> int:
    return math.prod(-(-k // s) for k, s in zip(kernel, stride or kernel, strict=True))


def _most(large: Sizes, small: Sizes) -> int:
    return math.prod(-(-one // two) + 1 for one, two in zip(large, small, strict=True))


def _adapted(operand: torch.Tensor, sizes: Sizes) -> int:
    return _most(operand.shape[-len(sizes) :], sizes)


def _adapted_back(cotangent: torch.Tensor, x: torch.Tensor) -> int:
    return _most(cotangent.shape[-2:], x.shape[-2:])


def _upsampled_back(cotangent: torch.Tensor, output: Sizes, sizes: Sizes, *how: Any) -> int:
    return _most(output, sizes[2:])


def _padded_back(cotangent: torch.Tensor, x: torch.Tensor, padding: Sizes) -> int:
    return math.prod(1 + max(0, *padding[place : place + 2]) for place in range(0, len(padding), 2))


RULES: dict[str, Callable[..., Any]] = {
    "convolution": convolution, "convolution_backward": convolution_backward, "constant_pad_nd": constant_pad_nd,
    "avg_pool2d": linear(aten.avg_pool2d, _pooled), "avg_pool3d": linear(aten.avg_pool3d, _pooled),
    "avg_pool2d_backward": linear(aten.avg_pool2d_backward, _pooled_back),
    "avg_pool3d_backward": linear(aten.avg_pool3d_backward, _pooled_back),
    "max_pool2d_with_indices_backward": linear(aten.max_pool2d_with_indices_backward, _pooled_back),
    "max_pool3d_with_indices_backward": linear(aten.max_pool3d_with_indices_backward, _pooled_back),
    "_adaptive_avg_pool2d": linear(aten._adaptive_avg_pool2d, _adapted),
    "_adaptive_avg_pool2d_backward": linear(aten._adaptive_avg_pool2d_backward, _adapted_back),
    "upsample_nearest1d_backward": linear(aten.upsample_nearest1d_backward, _upsampled_back),
    "upsample_nearest2d_backward": linear(aten.upsample_nearest2d_backward, _upsampled_back),
    "upsample_nearest3d_backward": linear(aten.upsample_nearest3d_backward, _upsampled_back),
    "replication_pad1d_backward": linear(aten.replication_pad1d_backward, _padded_back),
    "replication_pad2d_backward": linear(aten.replication_pad2d_backward, _padded_back),
    "replication_pad3d_backward": linear(aten.replication_pad3d_backward, _padded_back),
}  # fmt: skip
"""Operator -> rule, called with `Roundings` and the operator's operands in order."""


def max_pool(operand: Ranged, kernel: Sizes, stride: Sizes = (), padding: Sizes = (0,), dilation: Sizes = (1,),
             ceil_mode: bool = False) -> tuple[Any, bool]:  # noqa: FBT001, FBT002  # fmt: skip
    """Returns ((the largest element of each window, its index), True if no other element of a window may be as large).

    Of equal exact elements every program takes the first, because all programs pool with the same kernel.  Source:
    aten/src/ATen/native/cpu/MaxPoolKernel.cpp (2.13.0): a later element must be larger.
    """
    parts, num_dims = Parts.of(operand), len(kernel)
    pool = aten.max_pool2d_with_indices if num_dims == 2 else aten.max_pool3d_with_indices
    value, indices = pool(parts.value, kernel, stride, padding, dilation, ceil_mode)
    flat = Parts(*(part.flatten(-num_dims) for part in parts))
    places, is_there = _windows(
        parts.value.shape[-num_dims:], value.shape[-num_dims:], kernel, stride or kernel, padding, dilation
    )
    chosen = indices.flatten(-num_dims)[..., None]
    seen, off = (part[..., places] for part in (flat.value.double(), flat.error))
    best, e_best = (part.gather(-1, chosen[..., 0])[..., None] for part in (flat.value.double(), flat.error))
    may_be = (seen + off >= best - e_best) & ((off > 0) | (e_best > 0)) & (places != chosen) & is_there
    error = e_best[..., 0].reshape(value.shape)
    return (Parts(value, error, value.double().abs() + error).wrapped(), indices), not bool(may_be.any())


def _windows(
    sizes: Sizes, num_windows: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two tensors of the shape (number of windows, elements of a window).

    The first has the index of each element in the flattened image.  The second is False for an element that lies in the
    padding; its index is then that of the nearest element of the image.
    """
    places = torch.zeros(1, 1, dtype=torch.int64)
    is_there = torch.ones(1, 1, dtype=torch.bool)
    for dim, size in enumerate(sizes):
        step, pad, apart = (each[dim % len(each)] for each in (stride, padding, dilation))
        at = torch.arange(num_windows[dim])[:, None] * step - pad + torch.arange(kernel[dim]) * apart
        inside = (at >= 0) & (at < size)
        places = places[:, None, :, None] * size + at.clamp(0, size - 1)[None, :, None, :]
        is_there = is_there[:, None, :, None] & inside[None, :, None, :]
        places, is_there = (each.flatten(0, 1).flatten(1) for each in (places, is_there))
    return places, is_there
