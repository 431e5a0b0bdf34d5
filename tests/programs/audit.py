"""Subjects for audits, which must report whether their collectives matter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.subject import Answers
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.families.zero3.fetch.subject import zero3_fetch_all_gather
from equivtest.layout import Layout, Replicate
from equivtest.programs.case import ModuleCase
from equivtest.programs.run.module import run_module
from equivtest.tensors import Placed, slice_local

Given = Mapping[str, torch.Tensor]
WHOLE = Layout((Replicate(),))


def without_collectives(case: FetchCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """Answers right; every rank takes its answers from the whole tensors that it was given."""
    layouts, found = case.layouts(), {}
    for name in case.answer_names():
        kind, _, number = name.partition(".")
        whole = given[f"param.{number}"]
        if kind == "partition":
            mine = slice_local(whole, layouts[name], case.mesh_shape, mesh.get_local_rank())
            found[name] = Placed(mine, layouts[name])
        else:
            found[name] = Placed(whole.clone().requires_grad_(whole.requires_grad), layouts[name])
    return found


def with_collectives_for_many_parameters(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """A right fetch, which needs no collective in most cases."""
    return dict((zero3_fetch_all_gather if len(case.parameters) > 3 else without_collectives)(case, mesh, given))


def with_an_idle_collective(case: FetchCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """The same, with an all_reduce whose sum is never used."""
    dist.all_reduce(torch.ones(1), group=mesh.get_group())
    return without_collectives(case, mesh, given)


def with_an_idle_broadcast(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """A right fetch, with a broadcast that is never used."""
    dist.broadcast(torch.full((1,), mesh.get_local_rank()), group_src=0, group=mesh.get_group())
    return dict(zero3_fetch_all_gather(case, mesh, given))


def with_a_broadcast_of_equal_values(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """A right fetch, with a broadcast that no fault changes."""
    dist.broadcast(torch.ones(1), group_src=0, group=mesh.get_group())
    return dict(zero3_fetch_all_gather(case, mesh, given))


def with_an_idle_message(case: FetchCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """The same, with a message to rank 0 that is never used."""
    if dist.get_rank():
        dist.send(torch.ones(1), 0)
    else:
        dist.recv(torch.ones(1))
    return without_collectives(case, mesh, given)


def raises_on_another_sum(case: FetchCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """Raises if the sum is not over all ranks."""
    total = torch.tensor([mesh.get_local_rank() + 1])
    dist.all_reduce(total, group=mesh.get_group())
    if total.item() != mesh.size() * (mesh.size() + 1) // 2:
        raise ValueError(f"{total.item()} of {mesh.size()} ranks")
    return without_collectives(case, mesh, given)


def loops_until_all_are_done(case: FetchCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """A right fetch once a loop has ended, in which each rank is done one step after the rank before it."""
    num_done, step = torch.zeros(1), 0
    while num_done < mesh.size():
        num_done = torch.tensor([float(step >= mesh.get_local_rank())])
        dist.all_reduce(num_done, group=mesh.get_group())
        step += 1
    return without_collectives(case, mesh, given)


def wrong_everywhere(case: FetchCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """Fetches values of the other sign, less one."""
    found = without_collectives(case, mesh, given)
    with torch.no_grad():
        for placed in found.values():
            placed.local.neg_().sub_(1)
    return found


def averaged_by_hand(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Every rank runs the whole batch and averages gradients that are equal everywhere."""

    def parallelize(module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        for parameter in module.parameters():
            parameter.register_hook(lambda grad: _average(grad, mesh))
        return module

    return run_module(case, mesh, given, parallelize)


def _average(grad: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    grad = grad.clone()
    dist.all_reduce(grad, group=mesh.get_group())
    return grad / mesh.size()


def calls_each(case: FetchCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """Answers under param.0 the results of each of `CALLS` on this rank, one after the other; local, in float64."""
    rank, size, group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
    found = [torch.as_tensor(call(rank, size, group)).double().reshape(-1) for call in CALLS]
    return {"param.0": Placed(torch.cat(found), WHOLE)}


def _all_reduce(rank: int, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor, group=group)
    return tensor


def _all_gather(rank: int, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    output = torch.zeros(size)
    dist.all_gather_into_tensor(output, torch.tensor([rank + 1.0]), group=group)
    return output


def _reduce_scatter(rank: int, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    output = torch.zeros(1)
    dist.reduce_scatter_tensor(output, torch.arange(1.0, size + 1) * 10**rank, group=group)
    return output


def _broadcast(rank: int, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    tensor = torch.tensor([rank + 1.0])
    dist.broadcast(tensor, group_src=1, group=group)
    return tensor


def _all_to_all(rank: int, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    output = torch.zeros(size)
    dist.all_to_all_single(output, torch.arange(size) + 10.0 * (rank + 1), group=group)
    return output


CALLS: tuple[Callable[[int, int, dist.ProcessGroup], torch.Tensor], ...] = (
    _all_reduce,
    _all_gather,
    _reduce_scatter,
    _broadcast,
    _all_to_all,
)
