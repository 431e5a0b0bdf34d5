"""Meshes, made once per process by all processes together, whether they are part of them or not."""

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
    """The mesh on which this process runs `case`, or None where it takes no part; see `mesh_of`."""
    return mesh_of(device, case.mesh_shape, case.groups if case.members else (), case.axes)


@cache
def mesh_of(
    device: str,
    mesh_shape: tuple[int, ...],
    groups: tuple[tuple[int, ...], ...] = (),
    axes: tuple[str, ...] = (),
) -> DeviceMesh | None:
    """The mesh of that shape that has this process, or None; made once, by all processes together.

    Args:
        groups: Processes of each mesh, in mesh order; empty: one mesh of the whole world.
        axes: Names of the axes of that one; empty: none.

    Raises:
        Unsupported: a mesh is not ascending, and this torch sorts the processes of every group.

    DeviceMesh(device, [3, 1]) makes a group of sorted processes: its collectives go by ranks 1, 0
    where the mesh's coordinates are 0, 1, and a DTensor holds the wrong shards (2.13.0).

    Processes in no mesh make a group as well, which runs nothing: torch waits for ever where later programs make groups
    with `use_local_synchronization`, as FSDP2 does, and some processes are in fewer groups than others (finding 81).
    """
    kind = torch.device(device).type
    if not groups:
        return init_device_mesh(kind, mesh_shape, mesh_dim_names=axes or None)
    left_over = sorted(set(range(dist.get_world_size())).difference(*groups))
    made = [_new_group(tuple(group)) for group in (*groups, left_over) if group]
    own = [index for index, group in enumerate(groups) if dist.get_rank() in group]
    return DeviceMesh.from_group(made[own[0]], kind) if own else None


def _new_group(processes: tuple[int, ...]) -> dist.ProcessGroup:
    """A group with the processes in this order; an argument for that came with torch 2.13."""
    order: dict[str, Any] = {} if list(processes) == sorted(processes) else {"sort_ranks": False}
    if order and "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise Unsupported(
            f"torch {torch.__version__} sorts the processes of a group, so it makes no mesh of {processes}"
        )
    made: dist.ProcessGroup = dist.new_group(list(processes), **order)
    return made


def rank_in(mesh: DeviceMesh) -> int:
    """This process's rank in the mesh, counted row by row; torch makes `mesh.mesh` anew at each look at it."""
    return int(mesh.mesh.flatten().tolist().index(dist.get_rank()))
