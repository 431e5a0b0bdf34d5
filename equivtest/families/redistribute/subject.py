"""Subject that calls DTensor.redistribute, and the calls that make DTensors from plain tensors and back.

Source: DTensor.redistribute, from_local, to_local, full_tensor and distribute_tensor in
torch/distributed/tensor/_api.py (2.13.0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import tensor as torch_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from equivtest.base.refusal import is_older
from equivtest.cases.subject import (
    Answers,
    Given,
    dtensor_of,
    flattened_mesh,
    own_operand,
    placements_of,
    require_form,
    under_contract,
)
from equivtest.errors import Unsupported
from equivtest.families.redistribute.case import RedistributeCase
from equivtest.families.redistribute.case_refused import RefusedRedistributeCase
from equivtest.layout import Layout, Replicate
from equivtest.tensors import DTYPES

Move = Callable[[RedistributeCase, DTensor], DTensor]
"""Function (case, x) -> x redistributed from the case's source to its target."""


def redistribute(case: RedistributeCase, mesh: DeviceMesh, given: Given) -> Answers:
    return run_redistribute(case, mesh, given, move_by_torch)


def move_by_torch(case: RedistributeCase, x: DTensor) -> DTensor:
    return x.redistribute(placements=asked_placements(case), async_op=case.async_op, **asked_dtypes(case))


def asked_dtypes(case: RedistributeCase) -> dict[str, Any]:
    asked = {"forward_dtype": case.forward_dtype, "backward_dtype": case.backward_dtype}
    return {name: DTYPES[dtype] for name, dtype in asked.items() if dtype}


def run_redistribute(case: RedistributeCase, mesh: DeviceMesh, given: Given, move: Move) -> Answers:
    """Redistributes x forward by `move`, and the cotangent backward. The road 'full_tensor' does not call `move`.

    Raises:
        Unsupported: the case has `grad_source` or a dtype of redistribute, and the installed torch is older than 2.13.
    """
    if is_older(torch.__version__) and (case.grad_source or len(case.dtypes) > 1):
        raise Unsupported(f"torch {torch.__version__} documents these arguments differently")
    if case.flattened:
        mesh = flattened_mesh(mesh.device_type, case.mesh_shape)
    leaf, x = enter(case, mesh, given["x"])
    output = leave(case, x, move)
    require_form(output, is_plain=case.leaves_as_plain_tensor)
    if output.requires_grad:
        torch.autograd.backward(output, take_cotangent(case, mesh, given["cotangent"]))
    found: dict[str, torch.Tensor | None] = {"output": output}
    found |= {f"grad.{name}": leaf.grad for name in case.requires_grad}
    return under_contract(case, found)


def enter(case: RedistributeCase, mesh: DeviceMesh, given: torch.Tensor) -> tuple[torch.Tensor, DTensor]:
    """Returns (leaf, DTensor to redistribute). The leaf requires a gradient if the case requires the gradient of x."""
    layout, needs_grad = case.operand_layout("x"), bool(case.requires_grad)
    if case.road == "distribute":
        is_source = set(mesh.get_coordinate() or ()) == {case.source_rank}
        whole = given.detach() if is_source else torch.full_like(given, torch.nan)
        placements = counted(case, placements_of(layout))
        made = distribute_tensor(whole.requires_grad_(needs_grad), mesh, placements, src_data_rank=case.source_rank)
        return made, made
    local = own_operand(given, layout)
    if case.checks and not has_right_copy(layout, mesh):
        local = torch.full_like(local, torch.nan)
    if case.road == "dtensor":
        made = as_dtensor(case, mesh, local, "x")
        made.requires_grad_(needs_grad)
        return made, made
    local.requires_grad_(needs_grad)
    return local, as_dtensor(case, mesh, local, "x")


def has_right_copy(whole: Layout, mesh: DeviceMesh) -> bool:
    """True if this rank is the first along each axis on which the tensor is replicated."""
    places = zip(whole.placements, mesh.get_coordinate() or (), strict=True)
    return not any(isinstance(placement, Replicate) and place for placement, place in places)


def leave(case: RedistributeCase, x: DTensor, move: Move) -> torch.Tensor:
    """Redistributes x. Passes the placements of the cotangent, if the case has them, to torch as `grad_placements`."""
    if not case.leaves_as_plain_tensor:
        return move(case, x)
    grad_placements = placements_of(case.cotangent_layout) if case.cotangent else None
    if case.road == "full_tensor":
        return x.full_tensor(grad_placements=grad_placements)
    return move(case, x).to_local(grad_placements=grad_placements)


def take_cotangent(case: RedistributeCase, mesh: DeviceMesh, given: torch.Tensor) -> torch.Tensor:
    local = own_operand(given, case.cotangent_layout)
    return local if case.leaves_as_plain_tensor else as_dtensor(case, mesh, local, "cotangent")


def as_dtensor(case: RedistributeCase, mesh: DeviceMesh, local: torch.Tensor, name: str) -> DTensor:
    """Makes 'x' or 'cotangent' from this rank's local tensor, without a collective unless the case has `checks`."""
    placements = placements_of(case.operand_layout(name))
    if name == "x" and case.road in ("local", "full_tensor"):
        placements = counted(case, placements)
    options: dict[str, Any] = {"run_check": case.checks and name == "x"}
    if name == "x" and case.grad_source:
        options["grad_placements"] = placements_of(case.gradient_layout)
    if name == "x" and not case.states_shape:
        return DTensor.from_local(local, mesh, placements, **options)
    is_contiguous = case.tensors[name].is_contiguous
    return dtensor_of(local, mesh, placements, case.shape, is_contiguous=is_contiguous, **options)


def asked_placements(case: RedistributeCase) -> list[Placement]:
    """Returns the placements to request from torch. They are invalid if the case must be refused."""
    right = counted(case, placements_of(case.layouts()["output"]))
    if not isinstance(case, RefusedRedistributeCase):
        return right
    if case.misfit == "to_partial":
        return [torch_tensor.Partial()] * case.num_axes
    if case.misfit == "dim":
        return [torch_tensor.Shard(len(case.shape)), *right[1:]]
    return [*right, right[-1]] if case.misfit == "too_many" else right[:-1]


def counted(case: RedistributeCase, placements: list[Placement]) -> list[Placement]:
    """Returns the placements, with the dims of shards counted from the end if the case says so."""
    if not case.from_end:
        return placements
    num_dims = len(case.shape)
    return [
        torch_tensor.Shard(each.dim - num_dims) if isinstance(each, torch_tensor.Shard) else each for each in placements
    ]
