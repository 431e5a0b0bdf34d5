"""Subjects with a fault in exactly one layer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.subject import Answers
from equivtest.families.linear.case import LinearCase
from equivtest.families.linear.subject import rowwise_linear
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.families.zero3.fetch.subject import zero3_fetch_all_gather

Given = Mapping[str, torch.Tensor]


def on_a_wrong_kernel(case: LinearCase, mesh: DeviceMesh, given: Given) -> Answers:
    """A right layer, on ranks whose products forget their last element."""

    def mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        found = torch.einsum("ij,jk->ijk", left, right).sum(1)
        found.view(-1)[-1:] = 0
        return found

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", mm, "CPU", allow_override=True)
    try:
        return dict(rowwise_linear(case, mesh, given))
    finally:
        library._destroy()


def with_another_reduction(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """A fetch after an all_reduce in which ranks ask for different reductions."""
    op = dist.ReduceOp.SUM if mesh.get_local_rank() == 0 else dist.ReduceOp.MAX
    dist.all_reduce(torch.ones(1), op=op, group=mesh.get_group())
    return dict(zero3_fetch_all_gather(case, mesh, given))


def with_an_operand_changed(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Overwrites an operand before it has been sent, then fetches parameters with twice their values."""
    operand, results = torch.ones(8), [torch.empty(8) for _ in range(mesh.size())]
    work = dist.all_gather(results, operand, group=mesh.get_group(), async_op=True)
    operand.zero_()
    work.wait()
    return _twice(case, mesh, given)


def through_two_groups(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Calls two groups of the same ranks in another order on each rank, then fetches twice the values."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    sums, messages = [torch.full((3,), 1.0 + place) for place in range(2)], [torch.full((3,), 4.0), torch.ones(3)]
    works = []
    for place in (0, 1) if rank == 0 else (1, 0):
        exchange = dist.isend if rank == 0 else dist.irecv
        works.append(dist.all_reduce(sums[place], group=groups[place], async_op=True))
        works.append(exchange(messages[place], 1 - rank, groups[place]))
        works.append(dist.barrier(groups[place], async_op=True))
        time.sleep(0.02 * rank)
    for work in works:
        assert work is not None
        work.wait()
    return _twice(case, mesh, given)


def from_anybody(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """A message from whoever sends one, which says who that was; and such a fetch."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1)
    else:
        assert dist.recv(torch.zeros(3)) == 0
    return _twice(case, mesh, given)


def looked_after(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Uses a sum once it is complete, and waits for it later; then fetches."""
    total = torch.ones(3)
    work: Any = dist.all_reduce(total, group=mesh.get_group(), async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    total.zero_()
    work.wait()
    return _twice(case, mesh, given)


def told_by_name(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Passes the peer and tag of a message by name; then fetches."""
    group: Any = dist.group.WORLD
    if dist.get_rank() == 0:
        group.send([torch.ones(3)], tag=7, dstRank=1).wait()
    else:
        group.recv([torch.zeros(3)], tag=7, srcRank=0).wait()
    return _twice(case, mesh, given)


def _twice(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    found: Any = zero3_fetch_all_gather(case, mesh, given)
    with torch.no_grad():
        for name, placed in found.items():
            placed.local.mul_(2 if name.startswith("param") else 1)
    return dict(found)


def gathers_rows_of_its_own(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Rank 1 gives more rows than rank 0; each rank allocates twice its own number of rows."""
    mine = torch.ones(mesh.get_local_rank() + 1)
    dist.all_gather_into_tensor(mine.new_empty(2 * len(mine)), mine, group=mesh.get_group())
    return _twice(case, mesh, given)


def gathers_rows_into_room_for_all(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Rank 1 gives more rows than rank 0; each rank allocates the right size for every rank."""
    room = [torch.empty(rank + 1) for rank in range(mesh.size())]
    dist.all_gather(room, torch.ones(mesh.get_local_rank() + 1), group=mesh.get_group())
    return _twice(case, mesh, given)


def sends_more_than_is_awaited(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Rank 1 sends two rows to each rank, and rank 0 awaits one of each."""
    rank = mesh.get_local_rank()
    splits = [rank + 1] * mesh.size()
    dist.all_to_all_single(torch.empty(sum(splits)), torch.ones(sum(splits)), splits, splits, group=mesh.get_group())
    return _twice(case, mesh, given)


def broadcasts_more_than_is_awaited(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Rank 0 broadcasts one element, rank 1 expects two."""
    dist.broadcast(torch.ones(mesh.get_local_rank() + 1), group_src=0, group=mesh.get_group())
    return _twice(case, mesh, given)
