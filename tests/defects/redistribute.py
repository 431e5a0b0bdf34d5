"""Redistributions that are wrong in one way each; by the road of full_tensor all are right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar, cast
from unittest.mock import patch

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from equivtest.cases.operands import partial_axes
from equivtest.cases.subject import Answers, Given, placements_of
from equivtest.families.redistribute import subject
from equivtest.families.redistribute.case import RedistributeCase
from equivtest.families.redistribute.case_refused import RefusedRedistributeCase
from equivtest.families.redistribute.subject import move_by_torch, run_redistribute
from equivtest.layout import coordinate_of, local_box, shard_bounds
from equivtest.tensors import Placed
from tests.defects.defect import Replacing, argument_of

wrong = Replacing("redistribute")


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


@wrong(
    "size not a multiple of the world size",
    RedistributeCase(world_size=2, target=("shard(0)",), requires_grad=()),
    "one rank pads nothing; of two, the second's shard of one element is empty",
    kind="shape",
)
@argument_of(run_redistribute)
def padding_kept(case: RedistributeCase, x: DTensor) -> DTensor:
    """A shard that is shorter than the first is filled up to its size, and left so."""
    right = move_by_torch(case, x)
    local = right.to_local().detach()
    for placement in right.placements:
        if case.num_axes == 1 and isinstance(placement, Shard):
            missing = -(-right.shape[placement.dim] // case.world_size) - local.shape[placement.dim]
            shape = [missing if dim == placement.dim else size for dim, size in enumerate(local.shape)]
            local = torch.cat([local, local.new_zeros(shape)], dim=placement.dim)
    return _replace(right, local)


@wrong(
    "shard order",
    RedistributeCase(world_size=2, shape=(2,), target=("shard(0)",), requires_grad=()),
    "two ranks need one element each",
)
@argument_of(run_redistribute)
def shards_swapped(case: RedistributeCase, x: DTensor) -> DTensor:
    """A tensor is divided from its end on, beginning with the first rank."""
    right = move_by_torch(case, x)
    match _only_move(case):
        case _, Shard(dim=dim):
            start, stop = shard_bounds(x.shape[dim], case.world_size, _rank_in(x.device_mesh))
            return _replace(right, _whole(x).narrow(dim, x.shape[dim] - stop, stop - start).clone())
    return right


@wrong(
    "shard order",
    RedistributeCase(
        world_size=4,
        mesh=(2, 2),
        shape=(2,),
        source=("replicate", "replicate"),
        target=("shard(0)", "replicate"),
        requires_grad=(),
    ),
    "one rank has no other coordinates; the two places of the axis that divides need one element each",
)
@argument_of(run_redistribute)
def mesh_axes_swapped(case: RedistributeCase, x: DTensor) -> DTensor:
    """Each rank of a square mesh takes the place of the rank with swapped coordinates."""
    right, layout = move_by_torch(case, x), case.layouts()["output"]
    if case.num_axes != 2 or len(set(case.mesh_shape)) > 1 or partial_axes(layout):
        return right
    row, column = coordinate_of(_rank_in(x.device_mesh), case.mesh_shape)
    box = local_box(case.shape, layout, case.mesh_shape, column * case.mesh_shape[1] + row)
    local = _whole(x)
    for dim, size in enumerate(right.to_local().shape):
        local = local.narrow(dim, min(box[dim][0], case.shape[dim] - size), size)
    return _replace(right, local.clone())


@wrong(
    "uninitialised memory reaches a value",
    RedistributeCase(world_size=2, shape=(3,), source=("shard(0)",), requires_grad=()),
    "of one element the second of two ranks has an empty shard, which brings nothing; of two, both have one",
)
@argument_of(run_redistribute)
def shorter_shard_not_copied(case: RedistributeCase, x: DTensor) -> DTensor:
    """A shard shorter than the first brings uninitialized memory to the other placement."""
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


@wrong(
    "special values replaced",
    RedistributeCase(world_size=2, source=("shard(0)",), values=(("special", 0),), requires_grad=()),
    "one rank adds nothing; of two, the second adds +0.0 to the first one's -0.0, which is special value number 0",
    claim="is_exact_without_reduction",
)
@argument_of(run_redistribute)
def gathered_by_adding_zeros(case: RedistributeCase, x: DTensor) -> DTensor:
    """Shards are put into buffers of zeros that are added up, instead of being gathered or exchanged."""
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
    """Copies this rank's part of the whole tensor."""
    box = local_box(case.shape, case.layouts()["output"], case.mesh_shape, _rank_in(x.device_mesh))
    return whole[tuple(slice(start, stop) for start, stop in box)].clone()


# ------------------------------------------------------------------------------------------------
# Reductions


@wrong(
    "wrong divisor or wrong group",
    RedistributeCase(world_size=2, source=("partial(sum)",), requires_grad=()),
    "the average of one rank is its sum",
)
@argument_of(run_redistribute)
def averaged_instead_of_summed(case: RedistributeCase, x: DTensor) -> DTensor:
    """Operands of a sum are averaged, on a mesh of one axis."""
    right = move_by_torch(case, x)
    match _only_move(case):
        case Partial(reduce_op="sum"), Replicate() | Shard():
            return _replace(right, right.to_local().detach() / case.world_size)
    return right


@wrong(
    "inputs modified",
    RedistributeCase(world_size=2, source=("partial(sum)",), requires_grad=()),
    "one rank's operand is the sum; no odd integer leaves another one as it was",
    claim="does_not_touch_its_inputs",
)
@argument_of(run_redistribute)
def reduced_in_place(case: RedistributeCase, x: DTensor) -> DTensor:
    """Operands are added up in the memory of their owner."""
    right = move_by_torch(case, x)
    match _only_move(case):
        case Partial(reduce_op="sum"), Replicate() | Shard():
            own = x.to_local().detach()
            added = own.contiguous()
            dist.all_reduce(added, group=x.device_mesh.get_group())
            own.copy_(added)
    return right


@wrong(
    "other collectives than documented",
    RedistributeCase(world_size=2, source=("partial(sum)",), target=("shard(0)",), requires_grad=(), records=True),
    "one rank reduces nothing",
    claim="uses_only_collectives",
)
@argument_of(run_redistribute)
def made_whole_then_divided(case: RedistributeCase, x: DTensor) -> DTensor:
    """Gathers the whole tensor on every rank, although the result is sharded; each rank then keeps its part."""
    match _only_move(case):
        case _, Shard():
            return move_by_torch(case, x.redistribute(placements=[Replicate()]))
    return move_by_torch(case, x)


@wrong(
    "misfits accepted",
    RefusedRedistributeCase(world_size=1),
    "one rank and one element are accepted too",
    claim="refuses",
)
@argument_of(run_redistribute)
def partial_target_accepted(case: RedistributeCase, x: DTensor) -> DTensor:
    """Asked for partial sums, every rank takes the whole tensor for its operand."""
    if isinstance(case, RefusedRedistributeCase) and case.misfit == "to_partial":
        return DTensor.from_local(_whole(x), x.device_mesh, [Partial()] * case.num_axes, run_check=False)
    return move_by_torch(case, x)


# ------------------------------------------------------------------------------------------------
# Gradients


@wrong(
    "wrong divisor or wrong group",
    RedistributeCase(world_size=2, source=("partial(sum)",)),
    "one rank has one operand; no cotangent is zero",
    claim="gradients_equal_unsharded",
)
@argument_of(run_redistribute)
def gradient_of_operands_added(case: RedistributeCase, x: DTensor) -> DTensor:
    """The cotangent of a sum is summed over its operands, as if each rank had a different part of it."""
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


@wrong(
    "layout of gradients",
    RedistributeCase(world_size=1, source=("partial(sum)",)),
    "the layout is wrong on a mesh of one rank too",
    claim="keeps_layout_of_parameter",
)
def gradient_left_partial(case: RedistributeCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The gradient of a sum of operands comes back as operands, too."""
    answers = run_redistribute(case, mesh, given, move_by_torch)
    gradient = answers.get("grad.x")
    if isinstance(gradient, DTensor) and case.source[0] == "partial(sum)" and gradient.placements[0] == Replicate():
        placements = [Partial(), *gradient.placements[1:]]
        local = gradient.to_local() if mesh.get_coordinate()[0] == 0 else torch.zeros_like(gradient.to_local())  # type: ignore[index]
        answers["grad.x"] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=gradient.shape, stride=gradient.stride()
        )
    return answers


# ------------------------------------------------------------------------------------------------
# Arguments


@wrong(
    "another root",
    RedistributeCase(world_size=2, road="distribute", source_rank=1),
    "one rank is the only source",
)
def first_rank_distributes(case: RedistributeCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The first rank's tensor is distributed, whatever `src_data_rank` says."""

    def from_first(tensor: torch.Tensor, mesh: DeviceMesh, placements: list[Placement], **_: Any) -> DTensor:
        return distribute_tensor(tensor, mesh, placements)

    with patch.object(subject, "distribute_tensor", from_first):
        return run_redistribute(case, mesh, given, move_by_torch)


@wrong(
    "another dim",
    RedistributeCase(world_size=2, shape=(1, 1, 1), target=("shard(2)",), from_end=True),
    "of two dims the last is the second; on one rank all shards are whole",
    kind="layout",
)
@argument_of(run_redistribute)
def second_dim_for_the_last(case: RedistributeCase, x: DTensor) -> DTensor:
    """Counts a dim from the end as if the tensor were a matrix."""
    right = placements_of(case.layouts()["output"])
    if not case.from_end or isinstance(case, RefusedRedistributeCase):
        return move_by_torch(case, x)
    of_matrix = [Shard(min(each.dim, 1)) if isinstance(each, Shard) else each for each in right]
    return x.redistribute(placements=of_matrix, async_op=case.async_op, **subject.asked_dtypes(case))


@wrong(
    "layout of gradients",
    RedistributeCase(world_size=2, road="local", grad_source=("partial(sum)",)),
    "on one rank a partial gradient is whole",
    claim="gradients_equal_unsharded",
)
def asked_gradient_ignored(case: RedistributeCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Each rank gets the whole gradient, although it asked for its term."""
    answers = run_redistribute(replace(case, grad_source=()), mesh, given, move_by_torch)
    gradient = answers.get("grad.x")
    if isinstance(gradient, Placed):
        answers["grad.x"] = Placed(gradient.local, case.layouts()["grad.x"])
    return answers


@wrong(
    "rounded on its way",
    RedistributeCase(world_size=2, cotangent=("partial(sum)",), forward_dtype="bfloat16"),
    "one rank has the whole sum",
    claim="gradients_equal_unsharded",
)
def gradient_summed_in_forward_dtype(case: RedistributeCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The terms of the gradient are added up in `forward_dtype`."""
    dtypes = subject.asked_dtypes(case)
    dtypes |= {"backward_dtype": dtypes.get("backward_dtype", dtypes.get("forward_dtype"))}
    with patch.object(subject, "asked_dtypes", lambda case: dtypes):
        return run_redistribute(case, mesh, given, move_by_torch)
