"""Slices global tensors into shards, assembles them again, and compares bits, without torch.distributed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from equivtest.layout import (
    Layout,
    Partial,
    Replicate,
    coordinate_of,
    flat_axis,
    flat_bounds,
    local_box,
    local_shape,
)

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
SIGNIFICAND_BITS = {"float64": 53, "float32": 24, "bfloat16": 8, "float16": 11}
"""Number of bits of a dtype's significand, with the hidden bit: every integer up to 2**bits is a value of the dtype.

Source: IEEE 754-2019 table 3.5 (binary64, binary32, binary16); bfloat16 has 7 stored bits.
"""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Placed:
    """One rank's part of a tensor, and where its elements live in the whole tensor.

    Attributes:
        local: The rank's tensor, of any shape and dtype.
        layout: Where the elements of the whole tensor live.
        global_shape: The shape of the whole tensor, as the subject declares it. It is None if the subject does not
            declare it.
        indices: For each local element, its index in the flattened global tensor. This is an int64 tensor of the local
            shape, for a part that no layout describes, and `layout` is then UNTOLD. If None, `layout` describes the
            part.
    """

    local: torch.Tensor
    layout: Layout
    global_shape: tuple[int, ...] | None = None
    indices: torch.Tensor | None = None


@dataclass(frozen=True)
class Assembled:
    """A global tensor that was assembled from local tensors.

    `disagreeing` lists (rank, rank) pairs that have the same part with different bits.
    """

    tensor: torch.Tensor
    disagreeing: tuple[tuple[int, int], ...]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def at_rest(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a detached copy on the CPU with row-major strides.

    `Tensor.contiguous` keeps unusual strides of dims of size 0 and 1, which `Tensor.view(dtype)` refuses (torch
    2.13.0).
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 0 or flat.stride(0) != 1 or flat.device.type != "cpu":
        flat = at_rest(flat)
    return flat.view(_BITS[tensor.element_size()]).view(tensor.shape)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True if two tensors agree in dtype, shape and every bit. Two NaN with the same bits are equal."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(as_bits(left), as_bits(right))


def slice_local(
    tensor: torch.Tensor, layout: Layout, mesh_shape: tuple[int, ...], rank: int, *, padding: float = 0.0
) -> torch.Tensor:
    """Returns the part of a global tensor that `rank` has under `layout`, as a contiguous copy.

    Under a `Flat` layout, `padding` is the value of the padding elements.  Under `Partial` the first rank of the axis
    has the value.  The other ranks have zeros if the reduction is 'sum', and the same value if it is 'avg', 'max' or
    'min'.
    """
    shape = tuple(tensor.shape)
    coordinate = coordinate_of(rank, mesh_shape)
    axis = flat_axis(layout)
    if axis is None:
        box = local_box(shape, layout, mesh_shape, rank)
        local = tensor[tuple(slice(start, stop) for start, stop in box)].clone(memory_format=torch.contiguous_format)
    else:
        start, stop, size = flat_bounds(tensor.numel(), layout.placements[axis], mesh_shape[axis], coordinate[axis])
        local = tensor.new_full((size,), padding)
        local[: stop - start] = tensor.reshape(-1)[start:stop]
    for place, placement in zip(coordinate, layout.placements, strict=True):
        if placement == Partial("sum") and place > 0:
            local = torch.zeros_like(local)
    return local


def assemble(
    locals_: Mapping[int, torch.Tensor], global_shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...]
) -> Assembled:
    """Assembles the global tensor from the ranks' local parts, and finds replicas that disagree.

    Partial operands are reduced in rank order in the tensors' own dtype.  If several ranks have replicas of a part, the
    result has the lowest rank's replica.

    Raises:
        ValueError: a rank is missing, or its tensor does not have the shape of its shard.
    """
    num_ranks = math.prod(mesh_shape)
    if sorted(locals_) != list(range(num_ranks)):
        raise ValueError(f"need one tensor of each of {num_ranks} ranks, got ranks {sorted(locals_)}")
    for rank, local in locals_.items():
        shape = local_shape(global_shape, layout, mesh_shape, rank)
        if tuple(local.shape) != shape:
            raise ValueError(f"rank {rank} must hold a shard of shape {shape}, got {tuple(local.shape)}")
    disagreeing = []
    operands: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
    for rank in range(num_ranks):
        shard_key, partial_key = _keys(layout, coordinate_of(rank, mesh_shape))
        first = operands.setdefault(shard_key, {}).setdefault(partial_key, rank)
        if not same_bits(locals_[first], locals_[rank]):
            disagreeing.append((first, rank))
    whole = locals_[0].new_empty(global_shape)
    for ranks in operands.values():
        reduced = _reduce([locals_[rank] for rank in ranks.values()], layout)
        _put(whole, reduced, layout, mesh_shape, next(iter(ranks.values())))
    return Assembled(whole, tuple(disagreeing))


def assemble_listed(
    placed: Mapping[int, Placed], global_shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> tuple[Assembled, torch.Tensor]:
    """Assembles the global tensor from local parts, some of which have a list of their elements' indices, not a layout.

    Returns:
        (global tensor, first rank that has each element). The rank is -1 if no rank has the element. If one rank has an
            element twice with different bits, the pair (rank, rank) is among the disagreeing pairs.

    Raises:
        ValueError: a tensor does not have the shape of its shard, or of its list.
    """
    like = next(iter(placed.values())).local
    whole, holders = like.new_zeros(math.prod(global_shape)), torch.full((math.prod(global_shape),), -1)
    disagreeing = []
    for rank, each in placed.items():
        places = places_of(each, global_shape, mesh_shape, rank)
        if places.shape != each.local.shape:
            raise ValueError(f"rank {rank} must hold {tuple(places.shape)} elements, got {tuple(each.local.shape)}")
        places, local = places.reshape(-1), each.local.reshape(-1)
        new = holders[places] < 0
        whole[places[new]], holders[places[new]] = local[new], rank
        differing = as_bits(whole[places]) != as_bits(local)
        disagreeing += [(first, rank) for first in sorted(set(holders[places[differing]].tolist()))]
    return Assembled(whole.reshape(global_shape), tuple(disagreeing)), holders.reshape(global_shape)


def places_of(placed: Placed, global_shape: tuple[int, ...], mesh_shape: tuple[int, ...], rank: int) -> torch.Tensor:
    """Returns, for each element of a rank, its index in the flattened global tensor.  The layout must not add padding.

    Raises:
        ValueError: the layout cannot place such a tensor on the mesh.
    """
    if placed.indices is not None:
        return placed.indices
    numbered = torch.arange(math.prod(global_shape)).reshape(global_shape)
    return slice_local(numbered, placed.layout, mesh_shape, rank)


def _keys(layout: Layout, coordinate: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    placed = list(zip(coordinate, layout.placements, strict=True))
    shard_key = tuple(place for place, placement in placed if not isinstance(placement, Replicate | Partial))
    return shard_key, tuple(place for place, placement in placed if isinstance(placement, Partial))


def _reduce(operands: list[torch.Tensor], layout: Layout) -> torch.Tensor:
    ops = {placement.op for placement in layout.placements if isinstance(placement, Partial)}
    if not ops:
        return operands[0]
    if len(ops) > 1:
        raise ValueError(f"one reduction per tensor, got {layout}")
    stacked = torch.stack(operands)
    match ops.pop():
        case "max":
            return stacked.amax(0)
        case "min":
            return stacked.amin(0)
        case "avg":
            return stacked.sum(0) / len(operands)
        case _:
            return stacked.sum(0)


def _put(whole: torch.Tensor, local: torch.Tensor, layout: Layout, mesh_shape: tuple[int, ...], rank: int) -> None:
    axis = flat_axis(layout)
    if axis is None:
        box = local_box(tuple(whole.shape), layout, mesh_shape, rank)
        whole[tuple(slice(start, stop) for start, stop in box)] = local
        return
    index = coordinate_of(rank, mesh_shape)[axis]
    start, stop, _ = flat_bounds(whole.numel(), layout.placements[axis], mesh_shape[axis], index)
    whole.view(-1)[start:stop] = local[: stop - start]
