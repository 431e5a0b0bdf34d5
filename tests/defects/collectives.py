"""Collectives that are wrong in one way each, as a backend's may be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import distributed as dist

from equivtest.cases.names import Subject
from equivtest.families.collectives.case import Call, CollectivesCase
from equivtest.families.collectives.subject import REDUCE_OPS, begin, run_collectives
from equivtest.families.collectives.subject_room import Begin, Begun, Room, first, parts
from tests.defects.defect import Replacing, run_with

wrong = Replacing("collectives")

Spoil = Callable[[Room, torch.Tensor], torch.Tensor]


def wrong_in(*names: str) -> Callable[[Begin], Subject]:
    """Decorates how the collectives, or the functions, of these names begin; torch begins all others."""

    def subject_of(wrong: Begin) -> Subject:
        @functools.wraps(wrong)
        def begin_one(room: Room, call: Call, own: torch.Tensor) -> Begun:
            return (wrong if {call.name, call.function} & {*names} else begin)(room, call, own)

        return run_with(run_collectives, begin_one)

    return subject_of


def spoilt(spoil: Spoil) -> Begin:
    """Decorates a change to results: torch begins the collective, and its result is spoiled."""

    @functools.wraps(spoil)
    def begin_one(room: Room, call: Call, own: torch.Tensor) -> Begun:
        begun = begin(room, call, own)
        return replace(begun, result=lambda: spoil(room, begun.result()))

    return begin_one


@wrong(
    "shard order",
    CollectivesCase(world_size=2, collectives=("all_gather",)),
    "one rank has no other to change places with",
)
@wrong_in("all_gather")
@spoilt
def first_two_swapped(room: Room, result: torch.Tensor) -> torch.Tensor:
    """all_gather: the parts of ranks 0 and 1 are swapped."""
    return torch.cat((result[:2].flip(0), result[2:]))


@wrong("a term missing", CollectivesCase(world_size=2), "one rank's operand is never left out")
@wrong_in("all_reduce_sum")
def last_operand_left_out(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """all_reduce: with several ranks, the sum lacks the last rank's operand."""
    is_last = 0 < room.rank == room.ranks - 1
    return begin(room, call, torch.zeros_like(own) if is_last else own)


@wrong(
    "shard order", CollectivesCase(world_size=2, collectives=("reduce_scatter_tensor_sum",)), "one rank is its own next"
)
@wrong_in("reduce_scatter_tensor")
def parts_to_the_next_rank(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """reduce_scatter_tensor: each rank gets the part of the rank before it, whatever the reduction."""
    return begin(room, call, own.roll(len(own) // room.ranks, 0))


@wrong("another root", CollectivesCase(world_size=2, collectives=("broadcast",)), "one rank is the only root")
@wrong_in("broadcast")
@spoilt
def root_from_one(room: Room, result: torch.Tensor) -> torch.Tensor:
    """broadcast: roots are counted from 1, and from 0 again after the last."""
    return result.roll(-1, 0)


@wrong(
    "another reduction",
    CollectivesCase(world_size=2, collectives=("reduce_max",)),
    "one operand is its sum and its largest",
)
@wrong_in("reduce_max")
def maximum_added(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """reduce: a sum replaces the maximum."""
    return begin(room, replace(call, op="sum"), own)


@wrong(
    "a limit of size",
    CollectivesCase(world_size=1, collectives=("all_to_all_single",), numels=(1000,)),
    "one rank sends itself what it has; 1000 is the smallest size of the tables that is concerned",
)
@wrong_in("all_to_all_single")
@spoilt
def tail_of_large_sizes_lost(room: Room, result: torch.Tensor) -> torch.Tensor:
    """all_to_all_single: of 1000 elements and more for each rank the last one is lost."""
    return torch.cat((result[:, :-1], result[:, :1]), 1) if result.shape[1] >= 1000 else result


@wrong(
    "a collective not waited for",
    CollectivesCase(world_size=2, waits="async"),
    "one rank's operand is the result; a synchronous call is not waited for",
)
@wrong_in("all_reduce")
def taken_before_it_is_there(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """all_reduce: an asynchronous one is not waited for, and the operand taken for the result."""
    begun, early = begin(room, call, own), first(room, own).clone()
    return begun if room.case.waits == "at_once" else replace(begun, result=lambda: early)


@wrong(
    "inputs modified",
    CollectivesCase(world_size=2, collectives=("reduce_scatter_tensor_sum",)),
    "one rank's operand is its own sum",
    claim="does_not_touch_its_inputs",
)
@wrong_in("reduce_scatter_tensor")
def operand_left_reduced(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """reduce_scatter_tensor: all is reduced within the operand, and this rank's part copied from there."""
    work = dist.all_reduce(own, op=REDUCE_OPS[call.op], **room.how)
    return Begun([work], lambda: parts(room, own)[room.rank])


@wrong(
    "special values replaced",
    CollectivesCase(world_size=2, collectives=("all_gather_into_tensor",), values=(("special", 0),)),
    "one rank adds nothing, and the zero that dense values lack must be negative",
    claim="is_exact_without_reduction",
)
@wrong_in("all_gather_into_tensor")
def gathered_by_a_sum(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """all_gather_into_tensor: gathers by a sum, which adds zeros of all other ranks."""
    mine = first(room, own)
    output = mine.new_zeros((room.ranks, mine.numel()))
    output[room.rank] = mine.reshape(-1)
    return Begun([dist.all_reduce(output, **room.how)], lambda: output)


@wrong(
    "wrong divisor or wrong group",
    CollectivesCase(world_size=1, members=(1,)),
    "two meshes of one rank each add up what is the other's, where values differ between them",
)
@wrong_in("all_reduce", "functional_all_reduce", "coalesced_all_reduce")
def group_of_the_world(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """all_reduce, functional and coalesced ones too: sums over all processes, whatever the group."""
    return begin(replace(room, group=dist.group.WORLD), call, own)


@wrong(
    "shard order",
    CollectivesCase(world_size=2, collectives=("functional_all_to_all_single_uneven",), numels=(2,)),
    "one rank gets from itself alone; of one element no rank of two gets something from both",
)
@wrong_in("functional_all_to_all_single_uneven")
def first_rank_put_last(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """functional_all_to_all_single_uneven: the first rank's part comes last."""
    begun, (_, got) = begin(room, call, own), room.splits(len(own) // room.ranks)
    return replace(begun, result=lambda: _turned(begun.result(), got))


def _turned(result: torch.Tensor, got: list[int]) -> torch.Tensor:
    return torch.cat((result[got[0] : sum(got)], result[: got[0]], result[sum(got) :]))


@wrong(
    "a stride ignored",
    CollectivesCase(world_size=1, collectives=("all_gather_into_tensor",), numels=(2,), stride=2),
    "one element is contiguous whatever its stride",
)
@wrong_in("all_gather_into_tensor")
def taken_from_memory_in_order(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """all_gather_into_tensor: as many elements as the operand has are taken from memory, from its first on."""
    return begin(room, call, own.as_strided((own.numel(),), (1,)).view(own.shape))
