"""Lists operators on images and volumes, and operators that normalize."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from equivtest.cases.case import Shape
from equivtest.families.operators.case_forms import (
    Argument,
    Arguments,
    Form,
    Signature,
    Signatures,
    along,
    each,
    either,
    with_arguments,
)
from equivtest.families.operators.case_operator import ANY, SIGNS, chooses, rounded

Results = tuple[torch.Tensor, ...]


def _beside(*tails: tuple[int, ...]) -> Form:
    """Returns a form with one operand (N, C, *tail) per entry of `tails`, for N images of C channels."""
    return lambda shape: tuple(Signature(((shape[0], shape[1], *tail),)) for tail in tails)


def _volumes(shape: Shape) -> Signatures:
    """The operand (*shape, 2) has volumes if `shape` has three dims."""
    return (Signature(((*shape, 2),)),)


def _windows_of_volumes(shape: Shape) -> Signatures:
    """Returns signatures of windows that are apart, and of overlapping windows with padding that does not count."""
    window: Argument = (1, 1, 2)
    apart: Arguments = (("kernel_size", window),)
    overlapping: Arguments = (*apart, ("stride", 1), ("padding", (0, 0, 1)), ("count_include_pad", False))
    return tuple(Signature(((*shape, 2),), how) for how in (apart, overlapping))


def _scaled(*how: str) -> Form:
    """Returns a form with an input, and a weight and a bias for its last dim, or for dim 1 if 'channels'."""

    def form(shape: Shape) -> Signatures:
        last = shape[1:2] if "channels" in how else shape[-1:]
        return (Signature((shape, last, last)),)

    return form


def _unpooled(x: torch.Tensor) -> torch.Tensor:
    found, indices = functional.max_pool2d(x, (1, 2), return_indices=True)
    return functional.max_unpool2d(found, indices, (1, 2), output_size=x.shape[-2:])


def _unpooled_volume(x: torch.Tensor) -> torch.Tensor:
    found, indices = functional.max_pool3d(x, (1, 1, 2), return_indices=True)
    return functional.max_unpool3d(found, indices, (1, 1, 2), output_size=x.shape[-3:])


def _softmax_backward(g: torch.Tensor, y: torch.Tensor, dim: int) -> Any:
    return torch.ops.aten._softmax_backward_data(g, y, dim, g.dtype)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Results:
    return tuple(torch.native_layer_norm(x, x.shape[-1:], weight, bias, 0.5))


def _group_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, one_each: bool = False) -> Results:
    rows, channels = x.shape[:2]
    num_groups = channels if one_each else 1
    return tuple(torch.native_group_norm(x.contiguous(), weight, bias, rows, channels, x.shape[2], num_groups, 0.5))


def _batch_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Results:
    return tuple(torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, 0.5))  # noqa: FBT003  (torch's own order)


def _batch_norm_legit(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Results:
    return tuple(torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 0.5))  # noqa: FBT003  (the same)


def _batch_norm_updating(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Results:
    mean, var = weight.detach() * 0, weight.detach() * 0
    found: Any = torch.ops.aten._batch_norm_with_update(x, weight, bias, mean, var, 0.1, 0.5)
    return (*found[:3], mean, var)


def _sizes(shape: Shape) -> Signatures:
    """The argument `size` keeps the images of 2 by 3 pixels, or doubles them, or puts a pixel between each two."""
    x = (shape[0], shape[1], 2, 3)
    between: Arguments = (("size", (3, 5)), ("align_corners", True))
    return (*(Signature((x,), (("size", size),)) for size in ((2, 3), (4, 6))), Signature((x,), between))


def _resized(x: torch.Tensor, size: tuple[int, int], *, align_corners: bool = False) -> Any:
    return torch.ops.aten._upsample_bilinear2d_aa(x, list(size), align_corners)


def _corners(num_dims: int) -> Form:
    """Returns images or volumes, and a grid of values -1 and 1, so that every point is a corner of the image."""

    def form(shape: Shape) -> Signatures:
        places = (2,) if num_dims == 2 else (1, 2)
        inner = (shape[2], 2)[:num_dims] if num_dims == 2 else (shape[2], 2, 3)
        return (Signature(((*shape[:2], *inner), (shape[0], *places, 3, num_dims))),)

    return form


def _looked_up(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    sampler = torch.grid_sampler_2d if x.dim() == 4 else torch.grid_sampler_3d
    return sampler(x, grid.detach(), 0, 0, True)  # noqa: FBT003  (torch's own order)


ROWS = (
    chooses(
        "nn.functional.avg_pool3d",
        functional.avg_pool3d,
        _windows_of_volumes,
        rounds=True,
        num_dims=(3,),
    ),
    chooses(
        "nn.functional.max_pool2d",
        functional.max_pool2d,
        either(
            each(kernel_size=(1, 2)),
            each(kernel_size=(1, 2), stride=1, padding=(0, 1)),
            each(kernel_size=(1, 2), ceil_mode=True),
            each(kernel_size=(2, 1), stride=1, dilation=(2, 1)),
        ),
        num_dims=(3,),
        rounds=True,
    ),
    chooses("nn.functional.max_unpool2d", _unpooled, _beside((2, 2), (2, 4)), num_dims=(2,), rounds=True),
    chooses("nn.functional.max_unpool3d", _unpooled_volume, _volumes, num_dims=(3,), rounds=True),
    chooses("grid_sampler_2d", _looked_up, _corners(2), domains=(ANY, SIGNS), num_dims=(3,), rounds=True),
    chooses("grid_sampler_3d", _looked_up, _corners(3), domains=(ANY, SIGNS), num_dims=(3,), rounds=True),
    chooses("_upsample_bilinear2d_aa", _resized, _sizes, num_dims=(2,), rounds=True, cotangent_parts=32),
    rounded(
        "_softmax_backward_data",
        _softmax_backward,
        lambda shape: tuple(Signature((s.shapes[0],) * 2, s.arguments) for s in along()(shape)),
    ),
    rounded("native_layer_norm", _layer_norm, _scaled(), num_dims=(1, 2, 3)),
    rounded(
        "native_group_norm",
        _group_norm,
        either(_scaled("channels"), with_arguments(_scaled("channels"), one_each=True)),
        num_dims=(3,),
    ),
    rounded("native_batch_norm", _batch_norm, _scaled("channels"), num_dims=(2, 3)),
    rounded("_native_batch_norm_legit", _batch_norm_legit, _scaled("channels"), num_dims=(2, 3)),
    rounded("_batch_norm_with_update", _batch_norm_updating, _scaled("channels"), num_dims=(2, 3)),
)
