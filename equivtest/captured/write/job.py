"""A job that is captured, and the copy that a rank keeps of one tensor."""

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
"""(module, name of a parameter) -> this rank's shard, and the place of each element in the flattened whole."""


class Kept(NamedTuple):
    """A copy of one tensor on the CPU, with the fields of its entry in the manifest."""

    local: torch.Tensor
    layout: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    whole: Shape | None = None
    requires_grad: bool = False
    indices: torch.Tensor | None = None


@dataclass
class Job:
    """The properties of a job that all its keepers share.

    Attributes:
        module: The whole parallel module.
        run: As in `Manifest`.
        axes: Names of the mesh's axes; `mesh_shape` ranks along each.
        placed, shapes: As in `equivtest.capturing.capture`.
        size_bytes: Size of all copies so far; the count continues beyond the limit.
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
    """Returns the names of a mesh's axes, if the axes have names."""
    return tuple(mesh.mesh_dim_names or ()) if mesh else ()


def shape_of(mesh: DeviceMesh | None, world: Group) -> Shape:
    """Returns the number of ranks along each axis; without a mesh, all ranks along one axis."""
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
