"""Reductions and softmaxes of a DTensor along dims that the ranks share, or that they do not.

Source: common_reduction_strategy, softmax_strategy and _NormPartial in
torch/distributed/tensor/_ops/_math_ops.py (2.13.0).  For any placement of the operand, the
result is that of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from equivtest.cases.subject import Answers, Given, as_dtensor, run_backward, under_contract
from equivtest.families.reduction.case import ReductionCase

Reduce = Callable[[ReductionCase, torch.Tensor], torch.Tensor]


def reduction(case: ReductionCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The operation of the case, its result redistributed to every rank."""
    return run_reduction(case, mesh, given, reduce_by_torch)


def reduce_by_torch(case: ReductionCase, x: torch.Tensor) -> torch.Tensor:
    """torch's own operation, under whatever placement it comes out."""
    match case.op:
        case "norm":
            return cast(torch.Tensor, torch.linalg.vector_norm(x, 2, case.dims, keepdim=case.keepdim))
        case "softmax":
            return x.softmax(case.dims[0])
        case "log_softmax":
            return x.log_softmax(case.dims[0])
        case "amax":
            return x.amax(case.dims, keepdim=case.keepdim)
        case "mean":
            return x.mean(case.dims, keepdim=case.keepdim)
    return x.sum(case.dims, keepdim=case.keepdim)


def run_reduction(case: ReductionCase, mesh: DeviceMesh, given: Given, reduce: Reduce) -> Answers:
    """Forward and backward on this rank."""
    local = given["x"].detach()
    leaf = (local[0] if case.is_partial else local).requires_grad_("x" in case.requires_grad)
    output = reduce(case, enter(case, mesh, leaf))
    if isinstance(output, DTensor):
        output = output.redistribute(placements=[Replicate()])
    run_backward(output, case, mesh, given["cotangent"])
    found: dict[str, torch.Tensor | None] = {"output": output}
    return under_contract(case, found | {f"grad.{name}": leaf.grad for name in case.requires_grad})


def enter(case: ReductionCase, mesh: DeviceMesh, leaf: torch.Tensor) -> DTensor:
    """x as a DTensor, made without a collective."""
    if case.is_partial:
        return DTensor.from_local(leaf, mesh, [Partial("sum")], run_check=False)
    return as_dtensor(leaf, case, "x", mesh)
