"""Collectives that are wrong in one way each, as a backend's may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from equivtest.families.collectives.case import Call, CollectivesCase
from equivtest.families.collectives.subject import REDUCE_OPS, Begin, Begun, Room, begin, first, run_collectives
from equivtest.kit.defect import defect
from equivtest.kit.subject import Given
from equivtest.tensors import Placed

Answers = dict[str, Placed]


def only(name: str, wrong: Begin, *more: str) -> Begin:
    """As torch begins it, but for the collective, or the functions, of these names."""

    def begin_one(room: Room, call: Call, own: torch.Tensor) -> Begun:
        return (wrong if {call.name, call.function} & {name, *more} else begin)(room, call, own)

    return begin_one


def spoilt(spoil: Callable[[Room, torch.Tensor], torch.Tensor]) -> Begin:
    """As torch has it, and what comes out is spoilt."""

    def begin_one(room: Room, call: Call, own: torch.Tensor) -> Begun:
        begun = begin(room, call, own)
        return replace(begun, result=lambda: spoil(room, begun.result()))

    return begin_one


@defect(
    replaces="collectives",
    family="shard order",
    claim="equals_unsharded",
    smallest=CollectivesCase(world_size=2, collectives=("all_gather",)),
    why="one rank has nobody to change places with",
)
def first_two_swapped(case: CollectivesCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_gather: what ranks 0 and 1 gave change places."""

    def swap(room: Room, result: torch.Tensor) -> torch.Tensor:
        return torch.cat((result[:2].flip(0), result[2:]))

    return run_collectives(case, mesh, given, only("all_gather", spoilt(swap)))


@defect(
    replaces="collectives",
    family="a term missing",
    claim="equals_unsharded",
    smallest=CollectivesCase(world_size=2),
    why="one rank's operand is never left out",
)
def last_operand_left_out(case: CollectivesCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: the sum is that of all ranks but the last, where there are several."""

    def leave_out(room: Room, call: Call, own: torch.Tensor) -> Begun:
        is_last = 0 < room.rank == room.ranks - 1
        return begin(room, call, torch.zeros_like(own) if is_last else own)

    return run_collectives(case, mesh, given, only("all_reduce_sum", leave_out))


@defect(
    replaces="collectives",
    family="shard order",
    claim="equals_unsharded",
    smallest=CollectivesCase(world_size=2, collectives=("reduce_scatter_tensor_sum",)),
    why="one rank is its own next",
)
def parts_to_the_next_rank(case: CollectivesCase, mesh: DeviceMesh, given: Given) -> Answers:
    """reduce_scatter_tensor: each rank gets the part of the rank before it, whatever the reduction."""

    def turn(room: Room, call: Call, own: torch.Tensor) -> Begun:
        return begin(room, call, own.roll(len(own) // room.ranks))

    return run_collectives(case, mesh, given, only("reduce_scatter_tensor", turn))


@defect(
    replaces="collectives",
    family="another root",
    claim="equals_unsharded",
    smallest=CollectivesCase(world_size=2, collectives=("broadcast",)),
    why="one rank is the only root",
)
def root_from_one(case: CollectivesCase, mesh: DeviceMesh, given: Given) -> Answers:
    """broadcast: roots are counted from 1, and from 0 again after the last."""

    def turn(room: Room, result: torch.Tensor) -> torch.Tensor:
        return result.roll(-1, 0)

    return run_collectives(case, mesh, given, only("broadcast", spoilt(turn)))


@defect(
    replaces="collectives",
    family="another reduction",
    claim="equals_unsharded",
    smallest=CollectivesCase(world_size=2, collectives=("reduce_max",)),
    why="one operand is its sum and its largest",
)
def maximum_added(case: CollectivesCase, mesh: DeviceMesh, given: Given) -> Answers:
    """reduce: the sum is taken where the largest is asked for."""

    def add(room: Room, call: Call, own: torch.Tensor) -> Begun:
        return begin(room, replace(call, op="sum"), own)

    return run_collectives(case, mesh, given, only("reduce_max", add))


@defect(
    replaces="collectives",
    family="a limit of size",
    claim="equals_unsharded",
    smallest=CollectivesCase(world_size=1, collectives=("all_to_all_single",), numels=(1000,)),
    why="one rank sends itself what it has; 1000 is the smallest size of the tables that is concerned",
)
def tail_of_large_sizes_lost(case: CollectivesCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_to_all_single: of 1000 elements and more for each rank the last one is lost."""

    def lose(room: Room, result: torch.Tensor) -> torch.Tensor:
        return torch.cat((result[:, :-1], result[:, :1]), 1) if result.shape[1] >= 1000 else result

    return run_collectives(case, mesh, given, only("all_to_all_single", spoilt(lose)))


@defect(
    replaces="collectives",
    family="a collective not waited for",
    claim="equals_unsharded",
    smallest=CollectivesCase(world_size=2, waits="async"),
    why="one rank's operand is the result; a synchronous call is not waited for",
)
def taken_before_it_is_there(case: CollectivesCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce: an asynchronous one is not waited for, and the operand taken for the result."""

    def hurry(room: Room, call: Call, own: torch.Tensor) -> Begun:
        begun, early = begin(room, call, own), first(room, own).clone()
        return begun if room.case.waits == "at_once" else replace(begun, result=lambda: early)

    return run_collectives(case, mesh, given, only("all_reduce", hurry))


@defect(
    replaces="collectives",
    family="inputs modified",
    claim="does_not_touch_its_inputs",
    kind="touched",
    smallest=CollectivesCase(world_size=2, collectives=("reduce_scatter_tensor_sum",)),
    why="one rank's operand is its own sum",
)
def operand_left_reduced(case: CollectivesCase, mesh: DeviceMesh, given: Given) -> Answers:
    """reduce_scatter_tensor: all is reduced within the operand, and this rank's part copied from there."""

    def overwrite(room: Room, call: Call, own: torch.Tensor) -> Begun:
        work = dist.all_reduce(own, op=REDUCE_OPS[call.op], **room.how)
        return Begun([work], lambda: own.view(room.ranks, -1)[room.rank] if len(own) else own)

    return run_collectives(case, mesh, given, only("reduce_scatter_tensor", overwrite))


@defect(
    replaces="collectives",
    family="special values replaced",
    claim="is_exact_without_reduction",
    kind="bits",
    smallest=CollectivesCase(world_size=2, collectives=("all_gather_into_tensor",), values=(("special", 0),)),
    why="one rank adds nothing, and the zero that dense values lack must be negative",
)
def gathered_by_a_sum(case: CollectivesCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_gather_into_tensor: zeros of all other ranks are added to what is gathered."""

    def add(room: Room, call: Call, own: torch.Tensor) -> Begun:
        mine = first(room, own)
        output = mine.new_zeros((room.ranks, len(mine)))
        output[room.rank] = mine
        return Begun([dist.all_reduce(output, **room.how)], lambda: output)

    return run_collectives(case, mesh, given, only("all_gather_into_tensor", add))


@defect(
    replaces="collectives",
    family="wrong divisor or wrong group",
    claim="equals_unsharded",
    smallest=CollectivesCase(world_size=1, members=(1,)),
    why="two meshes of one rank each add up what is the other's, where values differ between them",
)
def group_of_the_world(case: CollectivesCase, mesh: DeviceMesh, given: Given) -> Answers:
    """all_reduce, functional and coalesced ones too: over all processes, whatever the group."""

    def widen(room: Room, call: Call, own: torch.Tensor) -> Begun:
        return begin(replace(room, group=dist.group.WORLD), call, own)

    others = ("functional_all_reduce", "coalesced_all_reduce")
    return run_collectives(case, mesh, given, only("all_reduce", widen, *others))


@defect(
    replaces="collectives",
    family="shard order",
    claim="equals_unsharded",
    smallest=CollectivesCase(world_size=2, collectives=("functional_all_to_all_single_uneven",), numels=(2,)),
    why="one rank gets from itself alone; of one element no rank of two gets something from both",
)
def first_rank_put_last(case: CollectivesCase, mesh: DeviceMesh, given: Given) -> Answers:
    """functional_all_to_all_single_uneven: what comes from the first rank is put behind what the others sent."""

    def turn(room: Room, call: Call, own: torch.Tensor) -> Begun:
        begun, (_, got) = begin(room, call, own), room.splits(len(own) // room.ranks)
        return replace(begun, result=lambda: _turned(begun.result(), got))

    return run_collectives(case, mesh, given, only("functional_all_to_all_single_uneven", turn))


def _turned(result: torch.Tensor, got: list[int]) -> torch.Tensor:
    return torch.cat((result[got[0] : sum(got)], result[: got[0]], result[sum(got) :]))
