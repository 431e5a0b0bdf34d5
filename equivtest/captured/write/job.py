"""Defines the job that is captured, and the copy that a rank makes of one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from equivtest.captured.format.manifest import Shape, Tensor
from equivtest.captured.format.tensor_file import digest_of
from equivtest.captured.write.group import Group

PlacedBy = Callable[[nn.Module, str], "tuple[torch.Tensor, torch.Tensor] | None"]
"""Function (module, name of a parameter) -> (this rank's shard, its elements' positions in the flattened parameter)."""


class Kept(NamedTuple):
    local: torch.Tensor
    layout: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    whole: Shape | None = None
    requires_grad: bool = False
    indices: torch.Tensor | None = None


@dataclass
class Job:
    """The job that is captured.  The `Keeper`s of all its modules share this object.

    Attributes:
        module: The whole parallel module.
        run: Hexadecimal digits that identify the run.
        placed, shapes: Arguments of `equivtest.capturing.capture`. `placed` returns the positions of the elements of
            plain parameters, and `shapes` has the shapes of the unsharded parameters.
        size_bytes: Size of all copies so far. After the limit is reached, this size still counts tensors that are no
            longer copied.
    """

    module: nn.Module
    world: Group
    run: str
    mesh: DeviceMesh | None
    batch: str
    batch_axis: str
    placed: PlacedBy | None
    shapes: Mapping[str, Shape]
    limit_bytes: int
    size_bytes: int = 0

    @property
    def axes(self) -> tuple[str, ...]:
        return axes_of(self.mesh)

    @property
    def mesh_shape(self) -> Shape:
        return shape_of(self.mesh, self.world)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def axes_of(mesh: DeviceMesh | None) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or ()) if mesh else ()


def shape_of(mesh: DeviceMesh | None, world: Group) -> Shape:
    """Returns the number of ranks along each axis of the mesh.  Without a mesh, all ranks lie along one axis."""
    return tuple(mesh.shape) if mesh else (world.size,)


def entry_of(kept: Kept) -> Tensor:
    return Tensor(
        sha256=digest_of(kept.local),
        layout=kept.layout,
        order=kept.order,
        whole=kept.whole,
        requires_grad=kept.requires_grad,
        is_listed=kept.indices is not None,
    )
