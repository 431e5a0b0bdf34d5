"""Subjects for cases on meshes within a larger world."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from equivtest.base import limits
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.tensors import Placed

Given = Mapping[str, torch.Tensor]


def tells_its_place(case: FetchCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """param.0: process, coordinate, rank in the group, the group's processes added up; (4,), int64, local."""
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=mesh.get_group())
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    numbers = torch.tensor([dist.get_rank(), *coordinate, mesh.get_local_rank(), int(total)])
    return {"param.0": Placed(numbers, case.layouts()["param.0"])}


def counts_gloo_threads(case: FetchCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """param.0: threads of gloo in this process, which run its groups' collectives or wait for messages; (1,), local.

    A thread names itself before it takes its first collective.
    """
    dist.all_reduce(torch.zeros(1), group=mesh.get_group())
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    number = sum("gloo" in name for name in names)
    return {"param.0": Placed(torch.tensor([float(number)]), case.layouts()["param.0"])}


def makes_a_group_by_itself(
    case: FetchCase, mesh: DeviceMesh, given: Given, limit_s: float = limits.CASE_S
) -> dict[str, Placed]:
    """param.0: how many processes are in a group that its members alone make, within the limit; (1,), local."""
    processes = list(range(dist.get_world_size()))
    group = dist.new_group(processes, use_local_synchronization=True, timeout=timedelta(seconds=limit_s))
    dist.all_reduce(number := torch.ones(1), group=group)
    return {"param.0": Placed(number, case.layouts()["param.0"])}


def makes_one_without_process_2_before(case: FetchCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    dist.new_group([0, 1])
    return makes_a_group_by_itself(case, mesh, given, 1.0)


def raises_in_process_2(case: FetchCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    if dist.get_rank() == 2:
        raise ValueError("no more")
    return tells_its_place(case, mesh, given)


def killed_in_process_2(case: FetchCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return tells_its_place(case, mesh, given)


def hangs_in_process_2(case: FetchCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    while dist.get_rank() == 2:
        time.sleep(0.1)
    return tells_its_place(case, mesh, given)
