"""Subjects of which the fault lies in one layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from equivtest.families.linear.case import LinearCase
from equivtest.families.linear.subject import rowwise_linear
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.families.zero3.fetch.subject import zero3_fetch_all_gather
from equivtest.kit.subject import Answers

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
    """A fetch after a reduction of which each rank asks for another."""
    op = dist.ReduceOp.SUM if mesh.get_local_rank() == 0 else dist.ReduceOp.MAX
    dist.all_reduce(torch.ones(1), op=op, group=mesh.get_group())
    return dict(zero3_fetch_all_gather(case, mesh, given))


def with_an_operand_changed(case: FetchCase, mesh: DeviceMesh, given: Given) -> Answers:
    """A fetch of whole parameters that are twice what they are; an operand is written to before it has been sent."""
    operand, results = torch.ones(8), [torch.empty(8) for _ in range(mesh.size())]
    work = dist.all_gather(results, operand, group=mesh.get_group(), async_op=True)
    operand.zero_()
    work.wait()
    found: Any = zero3_fetch_all_gather(case, mesh, given)
    with torch.no_grad():
        for name, placed in found.items():
            placed.local.mul_(2 if name.startswith("param") else 1)
    return dict(found)
