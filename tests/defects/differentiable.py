"""Differentiable collectives that are wrong in one way each, most of them in the backward alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import distributed as dist

from equivtest.cases.names import Subject
from equivtest.families.differentiable.case import Call, DifferentiableCase
from equivtest.families.differentiable.subject import Begin, Room, begin, run_differentiable
from tests.defects.defect import Replacing, run_with

wrong = Replacing("differentiable_collectives")

Backward = Callable[[Room, torch.Tensor], torch.Tensor]


def wrong_in(name: str) -> Callable[[Begin], Subject]:
    """Decorates how the collective of this name is called; torch calls all others."""

    def subject_of(one: Begin) -> Subject:
        @functools.wraps(one)
        def call_one(room: Room, call: Call, x: torch.Tensor) -> torch.Tensor:
            return (one if call.name == name else begin)(room, call, x)

        return run_with(run_differentiable, call_one)

    return subject_of


def backward(gradient_of: Backward) -> Begin:
    """Decorates the gradient of the operand from the gradient of the output; the forward is torch's."""

    @functools.wraps(gradient_of)
    def call_one(room: Room, call: Call, x: torch.Tensor) -> torch.Tensor:
        class Wrong(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return begin(room, call, x).detach() * 1

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                return gradient_of(room, gradient).reshape(x.shape)

        return Wrong.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    return call_one


def summed(room: Room, gradient: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks of the group."""
    total = gradient.clone()
    dist.all_reduce(total, group=room.group)
    return total


def in_first(room: Room, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of the first part, and zeros for the others."""
    return torch.stack([gradient, *[torch.zeros_like(gradient)] * (room.case.world_size - 1)])


@wrong(
    "a reduction missing in the backward",
    DifferentiableCase(world_size=2),
    "one rank's gradient is the sum",
    claim="gradients_equal_unsharded",
)
@wrong_in("nn_all_reduce")
@backward
def gradient_not_summed(room: Room, gradient: torch.Tensor) -> torch.Tensor:
    """all_reduce: each rank keeps its own gradient."""
    return in_first(room, gradient)


@wrong(
    "wrong divisor or wrong group",
    DifferentiableCase(world_size=2, collectives=("all_reduce",)),
    "one rank's gradient is the sum",
    claim="gradients_equal_unsharded",
)
@wrong_in("all_reduce")
@backward
def gradient_of_reduction_summed_twice(room: Room, gradient: torch.Tensor) -> torch.Tensor:
    """all_reduce: the sum over the ranks is summed again."""
    return in_first(room, summed(room, summed(room, gradient)))


@wrong(
    "wrong divisor or wrong group",
    DifferentiableCase(world_size=2, collectives=("all_gather_single",)),
    "one rank divides by one",
    claim="gradients_equal_unsharded",
)
@wrong_in("all_gather_single")
@backward
def gradient_divided_by_group_size(room: Room, gradient: torch.Tensor) -> torch.Tensor:
    """all_gather: the gradient is the mean over the ranks."""
    rows = summed(room, gradient).reshape(room.case.world_size, room.case.numel)
    return in_first(room, rows[room.rank] / room.case.world_size)


@wrong("another root", DifferentiableCase(world_size=2, collectives=("nn_scatter",)), "one rank is the only root")
@wrong_in("nn_scatter")
def scattered_by_another_root(room: Room, call: Call, x: torch.Tensor) -> torch.Tensor:
    """scatter: the next rank is the root."""
    return begin(replace(room, root=(room.root + 1) % room.case.world_size), call, x)


@wrong(
    "another root",
    DifferentiableCase(world_size=2, collectives=("nn_broadcast",)),
    "one rank is the only root",
    claim="gradients_equal_unsharded",
)
@wrong_in("nn_broadcast")
@backward
def gradient_at_another_root(room: Room, gradient: torch.Tensor) -> torch.Tensor:
    """broadcast: the gradient reaches the rank behind the root."""
    return in_first(room, summed(room, gradient) * (room.rank == (room.root + 1) % room.case.world_size))


@wrong(
    "another root",
    DifferentiableCase(world_size=1, collectives=("nn_reduce",), members=(1,)),
    "in the world both ranks are the same",
    claim="gradients_equal_unsharded",
)
@wrong_in("nn_reduce")
@backward
def root_compared_with_group_rank(room: Room, gradient: torch.Tensor) -> torch.Tensor:
    """reduce: the backward compares the rank in the group with the root in the world."""
    return in_first(room, summed(room, gradient * (room.rank == room.source)))


@wrong(
    "shard order",
    DifferentiableCase(world_size=2, collectives=("nn_all_to_all_single",)),
    "one rank has one part",
    claim="gradients_equal_unsharded",
)
@wrong_in("nn_all_to_all_single")
@backward
def gradient_not_exchanged(room: Room, gradient: torch.Tensor) -> torch.Tensor:
    """all_to_all: the gradients of other ranks' parts are not sent back."""
    return gradient


@wrong(
    "shard order",
    DifferentiableCase(world_size=2, collectives=("reduce_scatter_single",)),
    "one rank has one part",
    claim="gradients_equal_unsharded",
)
@wrong_in("reduce_scatter_single")
@backward
def gradient_gathered_backwards(room: Room, gradient: torch.Tensor) -> torch.Tensor:
    """reduce_scatter: the ranks' gradients are gathered in the reverse order."""
    parts = [torch.empty_like(gradient) for _ in range(room.case.world_size)]
    dist.all_gather(parts, gradient.contiguous(), group=room.group)
    return torch.stack(parts[::-1])


@wrong(
    "a reduction missing in the backward",
    DifferentiableCase(world_size=2, collectives=("all_reduce_coalesced",), numel=2),
    "one element lies in the first tensor of the call",
    claim="gradients_equal_unsharded",
)
@wrong_in("all_reduce_coalesced")
@backward
def second_tensor_forgotten(room: Room, gradient: torch.Tensor) -> torch.Tensor:
    """all_reduce_coalesced: the backward sums the gradient of the first tensor alone."""
    first, second = gradient.tensor_split(2)
    return in_first(room, torch.cat([summed(room, first), second]))
