"""Fetches and layers that take the wrong group, or other collectives than they are documented to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.families.zero3.fetch.subject import (
    Fetch,
    PartitionedParameter,
    fetch_by_all_gather,
    fetch_by_all_reduce,
    run_fetch,
)
from equivtest.tensors import Placed
from tests.defects.defect import Replacing, argument_of

wrong_all_gather = Replacing("zero3_fetch_all_gather")
wrong_all_reduce = Replacing("zero3_fetch_all_reduce")

Given = Mapping[str, torch.Tensor]
Parameters = Sequence[PartitionedParameter]


class _Delegate:
    """A mesh; subclasses change one method."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mesh, name)


class _RankOfTheWorld(_Delegate):
    def get_local_rank(self) -> int:
        return dist.get_rank()  # right: the rank in the mesh


class _GroupOfTheWorld(_Delegate):
    def get_group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD  # right: the mesh's


@wrong_all_gather(
    "wrong divisor or wrong group",
    FetchCase(world_size=1, parameters=((1,),), members=(1,)),
    "rank 0 of a mesh must be another process than 0, which takes a second process, not a second rank",
)
def global_rank_for_mesh_rank(case: FetchCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """all_gather: a process keeps the partition of its global rank; right if the mesh is the world."""
    return run_fetch(case, cast(DeviceMesh, _RankOfTheWorld(mesh)), given, fetch_by_all_gather)


@wrong_all_reduce(
    "wrong divisor or wrong group",
    FetchCase(world_size=1, parameters=((1,),), members=(1,)),
    "two meshes of one rank each add up what is the other's",
)
def world_group_for_mesh_group(case: FetchCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """all_reduce: the sum is taken over the world; right if the mesh is the world."""
    return run_fetch(case, cast(DeviceMesh, _GroupOfTheWorld(mesh)), given, fetch_by_all_reduce)


@wrong_all_reduce(
    "wrong divisor or wrong group", FetchCase(world_size=2, parameters=((1,),)), "one rank's sum is its average"
)
@argument_of(run_fetch)
def parameters_averaged(parameters: Parameters, mesh: DeviceMesh) -> Fetch:
    """all_reduce: the ranks' average replaces the sum."""
    fetching = fetch_by_all_reduce(parameters, mesh)

    def finish() -> None:
        for parameter in parameters:
            assert parameter.whole is not None
            parameter.whole.div_(mesh.size())

    return replace(fetching, finish=finish)


@wrong_all_gather(
    "other collectives than documented",
    FetchCase(world_size=1, parameters=((1,),), collective="all_gather", records=True),
    "one rank calls the barrier too",
    claim="uses_only_collectives",
)
def barrier_after_fetch(case: FetchCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """all_gather: every fetch ends with a needless barrier."""
    answers = run_fetch(case, mesh, given, fetch_by_all_gather)
    dist.barrier(group=mesh.get_group())
    return answers


@wrong_all_gather(
    "other collectives than documented",
    FetchCase(world_size=1, parameters=((1,), (1,)), requires_grad=(True, True), collective="all_gather", records=True),
    "one parameter takes one collective; two of them two, on one rank too",
    claim="uses_only_collectives",
)
@argument_of(run_fetch)
def one_collective_per_parameter(parameters: Parameters, mesh: DeviceMesh) -> Fetch:
    """all_gather: parameters are gathered one by one instead of together."""
    fetches = [fetch_by_all_gather([parameter], mesh) for parameter in parameters]

    def finish() -> None:
        for each in fetches:
            each.wait()

    return Fetch(parameters, None, finish)
