"""Collectives without a full backward: torch refuses it, or warns about it."""

from __future__ import annotations

import warnings

import torch
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.subject import Answers, Given
from equivtest.families.differentiable.case import Call, DifferentiableCase
from equivtest.families.differentiable.subject import Room, nn, run_differentiable


def broadcast(case: DifferentiableCase, mesh: DeviceMesh, given: Given) -> Answers:
    """A functional broadcast; its backward warns."""

    def begin(room: Room, call: Call, x: torch.Tensor) -> torch.Tensor:
        return functional.broadcast(x[0], 0, room.group)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return run_differentiable(case, mesh, given, begin)


def all_reduce_avg(case: DifferentiableCase, mesh: DeviceMesh, given: Given) -> Answers:
    return run_differentiable(case, mesh, given, lambda room, call, x: functional.all_reduce(x[0], "avg", room.group))


def reduce_scatter_avg(case: DifferentiableCase, mesh: DeviceMesh, given: Given) -> Answers:
    return run_differentiable(
        case, mesh, given, lambda room, call, x: functional.reduce_scatter_single(x.reshape(-1), "avg", 0, room.group)
    )


def all_gather_base(case: DifferentiableCase, mesh: DeviceMesh, given: Given) -> Answers:
    return run_differentiable(
        case, mesh, given, lambda room, call, x: nn._all_gather_base(x.new_empty(x.numel()), x[0], room.group)
    )
