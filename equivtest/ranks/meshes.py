"""Makes each DeviceMesh once per process.

All processes must make a mesh together, also the processes outside the mesh.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from equivtest.cases.case import Case
from equivtest.errors import Unsupported


def mesh_for(case: Case, device: str) -> DeviceMesh | None:
    """Returns the mesh of `case` that contains this process, or None if no mesh of the case contains it.

    All processes must call this function together: see `mesh_of`.
    """
    return mesh_of(device, case.mesh_shape, case.groups if case.members else (), case.axes)


@cache
def mesh_of(
    device: str,
    mesh_shape: tuple[int, ...],
    groups: tuple[tuple[int, ...], ...] = (),
    axes: tuple[str, ...] = (),
) -> DeviceMesh | None:
    """Returns the mesh of this shape that contains this process, or None if no mesh contains it.

    All processes must call this function together. The result is cached.

    Args:
        groups: Processes of each mesh, in mesh order. If empty, there is one mesh of all processes.
        axes: Names of the axes of the mesh of all processes. If empty, the axes have no names.

    Raises:
        Unsupported: the processes of a mesh are not ascending, and this torch sorts the processes of every group.

    DeviceMesh(device, [3, 1]) makes a sorted group. Collectives of the group use ranks 1, 0 at the mesh's coordinates
    0, 1, and a DTensor has the wrong shards (torch 2.13.0).

    The processes outside all meshes also make a group, in which nothing runs.  Without this group, these processes
    would be in fewer groups than the processes of the meshes. Then torch would wait for ever if a later program made
    groups with `use_local_synchronization`, as FSDP2 does (finding 81).
    """
    kind = torch.device(device).type
    if not groups:
        return init_device_mesh(kind, mesh_shape, mesh_dim_names=axes or None)
    left_over = sorted(set(range(dist.get_world_size())).difference(*groups))
    made = [_new_group(tuple(group)) for group in (*groups, left_over) if group]
    own = [index for index, group in enumerate(groups) if dist.get_rank() in group]
    return DeviceMesh.from_group(made[own[0]], kind) if own else None


def _new_group(processes: tuple[int, ...]) -> dist.ProcessGroup:
    """Makes a group whose ranks are in the order of `processes`.

    If that order is not ascending, torch 2.13 or later is needed.
    """
    order: dict[str, Any] = {} if list(processes) == sorted(processes) else {"sort_ranks": False}
    if order and "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise Unsupported(
            f"torch {torch.__version__} sorts the processes of a group, so it cannot make a mesh of {processes}"
        )
    made: dist.ProcessGroup = dist.new_group(list(processes), **order)
    return made


def rank_in(mesh: DeviceMesh) -> int:
    """Returns the number of this process in the mesh, counted row by row."""
    return int(mesh.mesh.flatten().tolist().index(dist.get_rank()))
