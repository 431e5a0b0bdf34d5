"""Redistributions that are wrong in one way each; by the road of full_tensor all are right."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from equivtest.families.redistribute.case import RedistributeCase
from equivtest.families.redistribute.case_refused import RefusedRedistributeCase
from equivtest.families.redistribute.subject import move_by_torch, run_redistribute
from equivtest.kit.operands import partial_axes
from equivtest.kit.subject import Answers, Given, placements_of
from equivtest.layout import coordinate_of, local_box, shard_bounds


class _InItsPlace(torch.autograd.Function):
    """A DTensor of other local values in the place of one; gradients pass as they are."""

    @staticmethod
    def forward(ctx: Any, right: DTensor, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local, right.device_mesh, right.placements, run_check=False, shape=right.shape, stride=right.stride()
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


T = TypeVar("T", bound=torch.Tensor)


def _replace(right: DTensor, local: torch.Tensor) -> DTensor:
    return cast(DTensor, _InItsPlace.apply(right, local))  # type: ignore[no-untyped-call]


def _only_move(case: RedistributeCase) -> tuple[Placement, Placement] | None:
    """(source, target) on a mesh of one axis and more than one rank; else None."""
    if case.num_axes > 1 or case.world_size == 1:
        return None
    return placements_of(case.operand_layout("x"))[0], placements_of(case.layouts()["output"])[0]


def _rank_in(mesh: DeviceMesh) -> int:
    """This process's rank in the mesh, counted row by row."""
    return int(mesh.mesh.flatten().tolist().index(dist.get_rank()))


# ------------------------------------------------------------------------------------------------
# Shards


def padding_kept(case: RedistributeCase, mesh: DeviceMesh, given: Given) -> Answers:
    """A shard that is shorter than the first is filled up to its size, and left so."""
    return run_redistribute(case, mesh, given, _keep_padding)


def _keep_padding(case: RedistributeCase, x: DTensor) -> DTensor:
    right = move_by_torch(case, x)
    local = right.to_local().detach()
    for placement in right.placements:
        if case.num_axes == 1 and isinstance(placement, Shard):
            missing = -(-right.shape[placement.dim] // case.world_size) - local.shape[placement.dim]
            shape = [missing if dim == placement.dim else size for dim, size in enumerate(local.shape)]
            local = torch.cat([local, local.new_zeros(shape)], dim=placement.dim)
    return _replace(right, local)


def shards_swapped(case: RedistributeCase, mesh: DeviceMesh, given: Given) -> Answers:
    """A tensor is divided from its end on, beginning with the first rank."""
    return run_redistribute(case, mesh, given, _divide_backwards)


def _divide_backwards(case: RedistributeCase, x: DTensor) -> DTensor:
    right = move_by_torch(case, x)
    match _only_move(case):
        case _, Shard(dim=dim):
            start, stop = shard_bounds(x.shape[dim], case.world_size, _rank_in(x.device_mesh))
            return _replace(right, _whole(x).narrow(dim, x.shape[dim] - stop, stop - start).clone())
    return right


def mesh_axes_swapped(case: RedistributeCase, mesh: DeviceMesh, given: Given) -> Answers:
    """On a square mesh each rank takes the place of the one whose coordinates are its own, swapped."""
    return run_redistribute(case, mesh, given, _swap_axes)


def _swap_axes(case: RedistributeCase, x: DTensor) -> DTensor:
    right, layout = move_by_torch(case, x), case.layouts()["output"]
    if case.num_axes != 2 or len(set(case.mesh_shape)) > 1 or partial_axes(layout):
        return right
    row, column = coordinate_of(_rank_in(x.device_mesh), case.mesh_shape)
    box = local_box(case.shape, layout, case.mesh_shape, column * case.mesh_shape[1] + row)
    local = _whole(x)
    for dim, size in enumerate(right.to_local().shape):
        local = local.narrow(dim, min(box[dim][0], case.shape[dim] - size), size)
    return _replace(right, local.clone())


def shorter_shard_not_copied(case: RedistributeCase, mesh: DeviceMesh, given: Given) -> Answers:
    """What a shard shorter than the first should bring to another placement is what was found in memory."""
    return run_redistribute(case, mesh, given, _leave_shorter_shards_out)


def _leave_shorter_shards_out(case: RedistributeCase, x: DTensor) -> DTensor:
    right = move_by_torch(case, x)
    match _only_move(case):
        case Shard(dim=dim), _:
            whole = _whole(x)
            buffer = torch.empty(whole.shape, dtype=whole.dtype)
            largest = shard_bounds(x.shape[dim], case.world_size, 0)[1]
            for rank in range(case.world_size):
                start, stop = shard_bounds(x.shape[dim], case.world_size, rank)
                if stop - start == largest:
                    buffer.narrow(dim, start, largest).copy_(whole.narrow(dim, start, largest))
            return _replace(right, _own_part(case, x, buffer))
    return right


def gathered_by_adding_zeros(case: RedistributeCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Shards are put into buffers of zeros that are added up, instead of being gathered or exchanged."""
    return run_redistribute(case, mesh, given, _gather_by_adding)


def _gather_by_adding(case: RedistributeCase, x: DTensor) -> DTensor:
    right = move_by_torch(case, x)
    match _only_move(case):
        case Shard(dim=dim), _:
            start, stop = shard_bounds(x.shape[dim], case.world_size, _rank_in(x.device_mesh))
            buffer = torch.zeros(x.shape, dtype=x.dtype)
            buffer.narrow(dim, start, stop - start).copy_(x.to_local().detach())
            dist.all_reduce(buffer, group=x.device_mesh.get_group())
            return _replace(right, _own_part(case, x, buffer))
    return right


def _whole(x: DTensor) -> torch.Tensor:
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local().detach()


def _own_part(case: RedistributeCase, x: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """A copy of what this rank is to hold of the whole tensor."""
    box = local_box(case.shape, case.layouts()["output"], case.mesh_shape, _rank_in(x.device_mesh))
    return whole[tuple(slice(start, stop) for start, stop in box)].clone()


# ------------------------------------------------------------------------------------------------
# Reductions


def averaged_instead_of_summed(case: RedistributeCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Operands of a sum are averaged, on a mesh of one axis."""
    return run_redistribute(case, mesh, given, _average)


def _average(case: RedistributeCase, x: DTensor) -> DTensor:
    right = move_by_torch(case, x)
    match _only_move(case):
        case Partial(reduce_op="sum"), Replicate() | Shard():
            return _replace(right, right.to_local().detach() / case.world_size)
    return right


def reduced_in_place(case: RedistributeCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Operands are added up in the memory of their owner."""
    return run_redistribute(case, mesh, given, _reduce_in_place)


def _reduce_in_place(case: RedistributeCase, x: DTensor) -> DTensor:
    right = move_by_torch(case, x)
    match _only_move(case):
        case Partial(reduce_op="sum"), Replicate() | Shard():
            own = x.to_local().detach()
            added = own.contiguous()
            dist.all_reduce(added, group=x.device_mesh.get_group())
            own.copy_(added)
    return right


def made_whole_then_divided(case: RedistributeCase, mesh: DeviceMesh, given: Given) -> Answers:
    """What is to end sharded is made whole on every rank first, of which each keeps its part."""
    return run_redistribute(case, mesh, given, _make_whole)


def _make_whole(case: RedistributeCase, x: DTensor) -> DTensor:
    match _only_move(case):
        case _, Shard():
            return move_by_torch(case, x.redistribute(placements=[Replicate()]))
    return move_by_torch(case, x)


def partial_target_accepted(case: RedistributeCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Asked for partial sums, every rank takes the whole tensor for its operand."""
    return run_redistribute(case, mesh, given, _accept_partial_target)


def _accept_partial_target(case: RedistributeCase, x: DTensor) -> DTensor:
    if isinstance(case, RefusedRedistributeCase) and case.misfit == "to_partial":
        return DTensor.from_local(_whole(x), x.device_mesh, [Partial()] * case.num_axes, run_check=False)
    return move_by_torch(case, x)


# ------------------------------------------------------------------------------------------------
# Gradients


def gradient_of_operands_added(case: RedistributeCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The cotangent of a sum is added up over its operands, as if each rank held another part of it."""
    return run_redistribute(case, mesh, given, _add_gradients)


def _add_gradients(case: RedistributeCase, x: DTensor) -> DTensor:
    match _only_move(case):
        case Partial(reduce_op="sum"), Replicate() | Shard():
            return move_by_torch(case, scale_gradient(x, case.world_size))
    return move_by_torch(case, x)


class _ScaledGradient(torch.autograd.Function):
    """The tensor as it is; its gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


def scale_gradient(tensor: T, factor: float) -> T:
    """The tensor as it is; its gradient times a factor."""
    return cast(T, _ScaledGradient.apply(tensor, factor))  # type: ignore[no-untyped-call]


def gradient_left_partial(case: RedistributeCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The gradient of a DTensor whose operands were added is given back as operands, too."""
    answers = run_redistribute(case, mesh, given, move_by_torch)
    gradient = answers.get("grad.x")
    if isinstance(gradient, DTensor) and case.source[0] == "partial(sum)" and gradient.placements[0] == Replicate():
        placements = [Partial(), *gradient.placements[1:]]
        local = gradient.to_local() if mesh.get_coordinate()[0] == 0 else torch.zeros_like(gradient.to_local())  # type: ignore[index]
        answers["grad.x"] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=gradient.shape, stride=gradient.stride()
        )
    return answers
