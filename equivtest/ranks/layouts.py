"""Determines the layout of a DTensor from its placements, without a collective."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.tensor import DTensor

from equivtest import layout
from equivtest.errors import Misuse
from equivtest.layout import Layout


def layout_of(tensor: DTensor, name: str) -> Layout:
    """Converts the placements of a DTensor to a `Layout` of this package, which has one placement per mesh axis.

    Raises:
        Misuse: no order of the axes that divide a dim explains its strided shards. The message has `name`.
    """
    placements: list[layout.Placement] = []
    for placement in tensor.placements:
        if placement.is_partial():
            placements.append(layout.Partial(str(getattr(placement, "reduce_op", "sum"))))
        elif placement.is_replicate():
            placements.append(layout.Replicate())
        else:
            placements.append(layout.Shard(placement.dim % tensor.dim()))  # type: ignore[attr-defined]
    return Layout(tuple(placements), shard_order(tensor, placements, name))


def shard_order(tensor: DTensor, placements: Sequence[layout.Placement], name: str) -> tuple[int, ...]:
    """Returns the mesh axes that shard `tensor`, in the order in which they divide it.

    The axes that shard the same dim stand together in the result. If the axes of each dim divide it in ascending order,
    as with `Shard` on all axes, the result is (). If an axis has a `_StridedShard`, some of the later axes divide the
    dim before this axis. The split_factor of the placement is the product of the sizes of these later axes.

    Source: DTensorSpec._maybe_convert_StridedShard_to_shard_order in torch/distributed/tensor/_dtensor_spec.py
    (2.13.0).
    """
    by_dim: dict[layout.Placement, list[int]] = {}
    for axis in reversed(range(len(placements))):
        if isinstance(placements[axis], layout.Shard):
            axes = by_dim.setdefault(placements[axis], [])
            axes.insert(_place_of(axis, tensor, axes, name), axis)
    if all(axes == sorted(axes) for axes in by_dim.values()):
        return ()
    return tuple(axis for axes in by_dim.values() for axis in axes)


def _place_of(axis: int, tensor: DTensor, later: Sequence[int], name: str) -> int:
    """Returns how many of the `later` axes, which shard the same dim as `axis`, divide the dim before `axis`."""
    placement, mesh = tensor.placements[axis], tensor.device_mesh
    if type(placement).__name__ != "_StridedShard":
        return 0
    factor = placement.split_factor  # type: ignore[attr-defined]
    places = [num for num in range(len(later) + 1) if math.prod(map(mesh.size, later[:num])) == factor]
    if not places:
        raise Misuse(
            f"{name} is a DTensor with placement {placement} on axis {axis} of a mesh of {tuple(mesh.shape)}: "
            "its split_factor must be 1 or the product of sizes of later axes that divide the same dim, in some "
            "order of the axes, got "
            f"{factor}: redistribute it to Shard"
        )
    return places[-1]
