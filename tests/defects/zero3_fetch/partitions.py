"""ZeRO-3 fetches that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.families.zero3.fetch.subject import (
    Fetch,
    PartitionedParameter,
    fetch_by_all_gather,
    fetch_by_all_reduce,
    launch,
    run_fetch,
)
from equivtest.tensors import Placed
from tests.defects.defect import Replacing, argument_of

wrong_all_reduce = Replacing("zero3_fetch_all_reduce")
wrong_all_gather = Replacing("zero3_fetch_all_gather")

Given = Mapping[str, torch.Tensor]
Parameters = Sequence[PartitionedParameter]


@wrong_all_reduce(
    "size not a multiple of the world size",
    FetchCase(world_size=2, parameters=((1,), (1,)), requires_grad=(True, True)),
    "one rank pads nothing, and only a parameter behind a padded one is displaced",
)
def stride_by_unpadded_size(case: FetchCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """all_reduce: partitions are copied by padded strides, the views are made by unpadded ones."""
    return run_fetch(case, mesh, given, lambda parameters, mesh: _all_reduce(parameters, mesh, copy_padded=True))


@wrong_all_reduce(
    "uninitialised memory reaches a value",
    FetchCase(world_size=2, parameters=((1,), (1,)), requires_grad=(True, True)),
    "one rank pads nothing, and only a parameter behind a padded one meets its padding",
)
def overlapping_padding(case: FetchCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """all_reduce: a parameter begins within the padding of the one before it, which is not zero.

    Right wherever padding happens to be zero.  DeepSpeed 0.14.3 to 0.19.3 (PR 8158).
    """
    return run_fetch(case, mesh, given, lambda parameters, mesh: _all_reduce(parameters, mesh, copy_padded=False))


def _all_reduce(parameters: Parameters, mesh: DeviceMesh, *, copy_padded: bool) -> Fetch:
    launch(parameters)
    padded = [parameter.partition.numel() * mesh.size() for parameter in parameters]
    buffer = parameters[0].partition.new_zeros((sum(padded),))
    copy_start = view_start = 0
    for parameter, padded_numel in zip(parameters, padded, strict=True):
        size = parameter.partition.numel()
        buffer.narrow(0, copy_start + mesh.get_local_rank() * size, size).copy_(parameter.partition)
        parameter.whole = buffer.narrow(0, view_start, parameter.numel).view(parameter.shape)
        copy_start += padded_numel if copy_padded else parameter.numel
        view_start += parameter.numel  # right: padded_numel
    work = dist.all_reduce(buffer, group=mesh.get_group(), async_op=True) if buffer.numel() else None
    return Fetch(parameters, work, lambda: None)


@wrong_all_gather("shard order", FetchCase(world_size=2, parameters=((2,),)), "two ranks need one element each")
@argument_of(run_fetch)
def first_partitions_swapped(parameters: Parameters, mesh: DeviceMesh) -> Fetch:
    """all_gather: the partitions of ranks 0 and 1 are swapped if both are full."""
    fetching = fetch_by_all_gather(parameters, mesh)

    def finish() -> None:
        fetching.finish()
        for parameter in parameters:
            _swap_first_two(parameter, mesh.size())

    return replace(fetching, finish=finish)


def _swap_first_two(parameter: PartitionedParameter, world_size: int) -> None:
    size = parameter.partition.numel()
    if world_size > 1 and 2 * size <= parameter.numel:
        assert parameter.whole is not None
        flat = parameter.whole.reshape(-1)
        swapped = torch.cat((flat[size : 2 * size], flat[:size], flat[2 * size :]))
        parameter.whole = swapped.view(parameter.shape)


@wrong_all_gather(
    "ranks that diverge",
    FetchCase(world_size=2, parameters=((1,),)),
    "one element leaves the second of two ranks without one",
    kind="raised",
)
@argument_of(run_fetch)
def raises_where_all_is_padding(parameters: Parameters, mesh: DeviceMesh) -> Fetch:
    """all_gather: a rank with only padding refuses alone; its peers wait for it."""
    for index, parameter in enumerate(parameters):
        start = mesh.get_local_rank() * parameter.partition.numel()
        if start >= parameter.numel > 0:
            raise ValueError(f"rank {mesh.get_local_rank()} has no element of parameter {index}")
    return fetch_by_all_gather(parameters, mesh)


@wrong_all_reduce(
    "flags",
    FetchCase(world_size=1, parameters=((1,),)),
    "one rank and one parameter that needs a gradient suffice",
    claim="does_not_touch_its_inputs",
)
def loses_requires_grad(case: FetchCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """all_reduce: the fetched parameters are plain views that need no gradient."""
    answers = run_fetch(case, mesh, given, fetch_by_all_reduce)
    return {name: replace(placed, local=placed.local.detach()) for name, placed in answers.items()}
