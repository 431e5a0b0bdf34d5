"""Computes where each element of a sharded tensor lives, by integer arithmetic without torch.

A mesh is a row-major grid of ranks.  `mesh_shape` has the number of ranks along each axis.  A layout has one placement
per mesh axis.  If one dim is sharded on several axes, the shard order says which axis divides first.

Source: torch.distributed.tensor placements (2.13.0), DeepSpeed ZeRO-3 partitions for `Flat`.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from dataclasses import dataclass

from equivtest.errors import Misuse

Bounds = tuple[int, int]
"""(start, stop) of a range of element indices.  `stop` is excluded."""
_remembered = functools.lru_cache(maxsize=2**14)  # pure, and called for every claim, draw and rank


@dataclass(frozen=True)
class Shard:
    """The placement in which the ranks of the axis divide one dim, by torch.chunk's rule.

    Attributes:
        dim: The dim, counted from the front.
    """

    dim: int

    def __str__(self) -> str:
        return f"shard({self.dim})"


@dataclass(frozen=True)
class Replicate:
    """The placement in which every rank of the axis has the whole tensor."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True)
class Partial:
    """The placement in which each rank of the axis has an operand.

    The value of the tensor is the reduction of all operands with `op`.

    Attributes:
        op: 'sum', 'avg', 'max' or 'min'.
    """

    op: str = "sum"

    def __str__(self) -> str:
        return f"partial({self.op})"


@dataclass(frozen=True)
class Flat:
    """The placement in which the tensor is flattened, padded and divided equally, as in ZeRO's partition.

    Attributes:
        padded_to: Number of elements after padding.
    """

    padded_to: int

    def __str__(self) -> str:
        return f"flat({self.padded_to})"


Placement = Shard | Replicate | Partial | Flat
REDUCE_OPS = ("sum", "avg", "max", "min")


@dataclass(frozen=True)
class Layout:
    """The placements of a tensor's elements on all axes of a mesh.

    Attributes:
        placements: One placement for each axis of the mesh.
        shard_order: The mesh axes that shard a dim, in the order in which they divide it.  This order matters only if
            several axes shard the same dim.  If empty, the first of these axes divides first, as is torch's default.
    """

    placements: tuple[Placement, ...]
    shard_order: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = ", ".join(str(placement) for placement in self.placements)
        return f"{text} (axes divide in order {self.shard_order})" if self.shard_order else text


UNTOLD = Layout(())
"""Layout of a plain tensor whose elements' positions are unknown, or listed in `Placed.indices`."""


@_remembered
def parse_placement(text: str) -> Placement:
    """Parses 'replicate', 'shard(1)', 'partial(sum)' or 'flat(6)'.  Raises Misuse for any other text."""
    if text == "replicate":
        return Replicate()
    if match := re.fullmatch(r"(shard|flat)\((\d+)\)", text):
        number = int(match[2])
        return Shard(number) if match[1] == "shard" else Flat(number)
    if (match := re.fullmatch(r"partial\((\w+)\)", text)) and match[1] in REDUCE_OPS:
        return Partial(match[1])
    raise Misuse(
        f"unknown placement {text!r}: write 'replicate', 'shard(DIM)', 'flat(PADDED_NUMEL)' "
        f"or 'partial(OP)' with OP one of {', '.join(REDUCE_OPS)}"
    )


def shard_bounds(length: int, num_shards: int, index: int) -> Bounds:
    """Returns the bounds (start, stop), in elements, of one shard of a dim.

    Every shard has ceil(length / num_shards) elements until the dim runs out.  Later shards are shorter or empty:
    shard_bounds(4, 3, 2) == (4, 4).

    Raises:
        ValueError: length < 0, num_shards < 1, or index out of range.

    Source: torch.distributed.tensor.Shard, which follows torch.chunk (2.13.0).
    """
    if length < 0:
        raise ValueError(f"length must be at least 0, got {length}")
    if num_shards < 1:
        raise ValueError(f"num_shards must be at least 1, got {num_shards}")
    if not 0 <= index < num_shards:
        raise ValueError(f"index must be in 0..{num_shards - 1}, got {index}")
    size = -(-length // num_shards)
    return min(index * size, length), min((index + 1) * size, length)


@_remembered
def coordinate_of(rank: int, mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the coordinate of `rank` on each axis of a row-major mesh."""
    if not 0 <= rank < math.prod(mesh_shape):
        raise ValueError(f"rank must be in 0..{math.prod(mesh_shape) - 1}, got {rank}")
    coordinate = []
    for size in reversed(mesh_shape):
        rank, place = divmod(rank, size)
        coordinate.append(place)
    return tuple(reversed(coordinate))


@_remembered
def flat_axis(layout: Layout) -> int | None:
    """Returns the mesh axis with `Flat`, or None.  Raises ValueError if another axis has `Flat` or `Shard`."""
    flat = [a for a, placement in enumerate(layout.placements) if isinstance(placement, Flat)]
    if not flat:
        return None
    if len(flat) > 1 or any(isinstance(placement, Shard) for placement in layout.placements):
        raise ValueError(f"Flat may be combined only with Replicate and Partial, got {layout}")
    return flat[0]


@_remembered
def local_box(
    global_shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...], rank: int
) -> tuple[Bounds, ...]:
    """Returns (start, stop) for each dim of the shard on `rank`.

    Under a `Flat` layout these are the bounds of the whole tensor.

    Raises:
        ValueError: placements and mesh axes differ in number, a sharded dim does not exist, or the shard order does not
            name each axis that shards a dim exactly once.
    """
    check_layout(global_shape, layout, mesh_shape)
    coordinate = coordinate_of(rank, mesh_shape)
    box = [(0, length) for length in global_shape]
    for axis in shard_axes(layout):
        placement = layout.placements[axis]
        assert isinstance(placement, Shard)
        outer_start, outer_stop = box[placement.dim]
        start, stop = shard_bounds(outer_stop - outer_start, mesh_shape[axis], coordinate[axis])
        box[placement.dim] = (outer_start + start, outer_start + stop)
    return tuple(box)


def is_partial(layout: Layout) -> bool:
    return any(isinstance(placement, Partial) for placement in layout.placements)


def shard_axes(layout: Layout) -> tuple[int, ...]:
    sharded = tuple(a for a, placement in enumerate(layout.placements) if isinstance(placement, Shard))
    if not layout.shard_order:
        return sharded
    if sorted(layout.shard_order) != list(sharded):
        raise ValueError(f"shard order must name the sharded axes {sharded} once each, got {layout.shard_order}")
    return layout.shard_order


def check_layout(global_shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...]) -> None:
    """Raises ValueError if `layout` cannot place a tensor of `global_shape` on the mesh."""
    if len(layout.placements) != len(mesh_shape):
        raise ValueError(f"a layout must have one placement per mesh axis, got {layout} on a mesh of {mesh_shape}")
    for placement in layout.placements:
        if isinstance(placement, Shard) and not 0 <= placement.dim < len(global_shape):
            raise ValueError(f"{placement} names no dim of a tensor of shape {global_shape}")
    axis = flat_axis(layout)
    if axis is not None:
        flat_bounds(math.prod(global_shape), layout.placements[axis], mesh_shape[axis], 0)


def flat_bounds(numel: int, placement: Placement, num_shards: int, index: int) -> tuple[int, int, int]:
    """Returns (start, stop, size) of shard `index` of a flattened tensor, all in elements.

    The shard has `size` elements: first the elements from `start` up to `stop` of the tensor, then padding.

    Raises:
        ValueError: `padded_to` is below numel or no multiple of num_shards.
    """
    assert isinstance(placement, Flat)
    if placement.padded_to < numel or placement.padded_to % num_shards:
        raise ValueError(
            f"padded_to must be a multiple of {num_shards} and at least {numel}, got {placement.padded_to}"
        )
    size = placement.padded_to // num_shards
    return min(index * size, numel), min((index + 1) * size, numel), size


@_remembered
def local_shape(
    global_shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...], rank: int
) -> tuple[int, ...]:
    """Returns the shape of the shard on `rank`.  Under `Flat` it has one dim, whose size includes the padding."""
    box = local_box(global_shape, layout, mesh_shape, rank)
    axis = flat_axis(layout)
    if axis is None:
        return tuple(stop - start for start, stop in box)
    index = coordinate_of(rank, mesh_shape)[axis]
    return (flat_bounds(math.prod(global_shape), layout.placements[axis], mesh_shape[axis], index)[2],)


def divided_dim(whole: tuple[int, ...], local: tuple[int, ...], mesh_shape: tuple[int, ...], rank: int) -> int | None:
    """Returns the dim that one mesh axis must shard so that `rank` has the shape `local`, or None."""
    for dim, axis in itertools.product(range(len(whole)), range(len(mesh_shape))):
        placements: list[Placement] = [Replicate()] * len(mesh_shape)
        placements[axis] = Shard(dim)
        if local != whole and local == local_shape(whole, Layout(tuple(placements)), mesh_shape, rank):
            return dim
    return None


def shard_kind(global_shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...]) -> str:
    """Returns how evenly the ranks share a tensor: 'even', 'uneven', or 'empty' if some rank has no element.

    Padding does not count as elements. So a padded shard is uneven, and a shard that has only padding is empty.
    """
    sizes = {_num_elements(global_shape, layout, mesh_shape, rank) for rank in range(math.prod(mesh_shape))}
    if math.prod(global_shape) and 0 in sizes:
        return "empty"
    return "even" if len(sizes) == 1 else "uneven"


def _num_elements(global_shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...], rank: int) -> int:
    axis = flat_axis(layout)
    if axis is None:
        return math.prod(local_shape(global_shape, layout, mesh_shape, rank))
    index = coordinate_of(rank, mesh_shape)[axis]
    start, stop, _ = flat_bounds(math.prod(global_shape), layout.placements[axis], mesh_shape[axis], index)
    return stop - start


def replicas(layout: Layout, mesh_shape: tuple[int, ...]) -> list[list[int]]:
    """Returns groups of ranks that have the same shard, and so must have the same bits.

    Ranks along a `Partial` axis have different operands, so these ranks are in different groups.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(mesh_shape)):
        placed = zip(coordinate_of(rank, mesh_shape), layout.placements, strict=True)
        key = tuple(place for place, placement in placed if not isinstance(placement, Replicate))
        groups.setdefault(key, []).append(rank)
    return list(groups.values())
