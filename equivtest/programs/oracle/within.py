"""Runs the unsharded module on real numbers, and counts roundings operation by operation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from equivtest.errors import Misuse, NotSupported
from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.exact import InexactData
from equivtest.oracle.expected import COPIED
from equivtest.oracle.operations import Found
from equivtest.oracle.places import Places
from equivtest.oracle.ranged import Ranged
from equivtest.programs.case import ModuleCase
from equivtest.programs.oracle.apart import TakesApart
from equivtest.programs.oracle.forced import Forced
from equivtest.programs.oracle.held import HeldAt
from equivtest.programs.oracle.unsharded import Answers, Tensors, run_parts, split
from equivtest.programs.reference import call_builder, in_dtype, with_parameters

if TYPE_CHECKING:
    from equivtest.oracle.running import RunningError


class Ran(NamedTuple):
    """Results of the module on each part of the batch.

    Attributes:
        rows, stacks: Results of `run_parts`.
        counted: The mode that counted the roundings. Further operations may run in this mode, such as the sum of
            `stacks` over the parts of the batch. Such operations count as computed by all ranks together.
        runs: The run of each part of the batch, with the right values at its boundaries.
    """

    rows: Answers
    stacks: Answers
    counted: RunningError
    runs: list[Forced]


def ran_within_bounds(
    case: ModuleCase,
    given: Tensors,
    held: Sequence[HeldAt],
    buffers: Sequence[Tensors] = (),
    *,
    takes_factors: bool = False,
) -> Ran:
    """Runs the module forward and backward once on each part of the batch. The parts' gradients are not added up.

    Args:
        held: The ranks' tensors for each part, from which the run continues. If empty, the run continues from its own
            values.
        buffers: Replacements of the module's buffers in each part, by name.
        takes_factors: True if a gradient of the ranks may be the right gradient multiplied by a constant factor: see
            `Forced`.
    """
    from equivtest.oracle.running import RunningError  # torch's decompositions take a second to import

    places = Places()
    num_ranks = (
        math.prod(case.mesh_of_part) if held and case.is_divided else case.num_shares
    )  # ranks that compute a part
    counted = RunningError(arithmetic_of(case.dtype), num_ranks, places)
    ranged = [{name: _ranged(counted, each) for name, each in part.items()} for part in split(case, given)]
    modules = [in_dtype(call_builder(case.build), case.dtype) for _ in ranged]
    for module, own in zip(modules, buffers, strict=False):
        _put_buffers(module, {name: buffer.clone() for name, buffer in own.items()})
    for module in modules:
        places.watch(module)
        with_buffers(module, counted, case.facts.buffers)
    runs = [
        Forced(
            module,
            counted,
            each,
            past_open=case.past_open,
            takes_factors=takes_factors or bool(case.training.step),
            owes_parts=not case.training.step,
        )
        for module, each in zip(modules, held, strict=False)
    ]
    try:
        with counted, TakesApart(), ExitStack() as stack:
            for run in runs:
                stack.enter_context(run)
            for module, part in zip(modules, ranged, strict=True):
                with_parameters(module, {name: part[name] for name in case.parameter_names()})
            rows, stacks = run_parts(case, modules, ranged)
            counted.roundings = replace(counted.roundings, ranks=case.world_size)
    except InexactData as error:
        raise Misuse(
            f"{case.build}, in {case.dtype}, with {case.takes}: {error}{places.refused}: {_way_out(error)}"
        ) from error
    except NotSupported:  # `expect` reports it
        raise
    except Exception as error:  # an arbitrary module fails on an unusual tensor
        raise Misuse(
            f"{case.build}, in {case.dtype}, with {case.takes}, cannot be followed operation by operation: "
            f"{type(error).__name__}: {error}{places.here()}"
        ) from error
    return Ran(rows, stacks, counted, runs)


def _way_out(error: InexactData) -> str:
    if "at random" in str(error):
        return "judge a module without it, call eval() on it, or set its probability to 0"
    if "item()" in str(error):
        return "decide by torch.where or by shapes, or judge the parts before and after it"
    return "judge a module without it, or write a case family with its own oracle"


def _ranged(counted: RunningError, tensor: torch.Tensor) -> torch.Tensor:
    return counted.exactly(tensor) if tensor.is_floating_point() else tensor


def with_buffers(module: nn.Module, counted: RunningError, names: Iterable[str]) -> None:
    """Tracks the errors of the named buffers, because the program writes to them."""
    floating = [name for name in names if module.get_buffer(name).is_floating_point()]
    _put_buffers(module, {name: counted.exactly(module.get_buffer(name)) for name in floating})


def _put_buffers(module: nn.Module, buffers: Tensors) -> None:
    for name, buffer in buffers.items():
        owner, _, last = name.rpartition(".")
        module.get_submodule(owner)._buffers[last] = buffer


def within_bounds(counted: RunningError, tensor: torch.Tensor) -> Found:
    """Returns a result with its bound. Integers, and results that depend on no tensor of the case, must be equal."""
    if isinstance(tensor, Ranged):
        return Found.within(counted.bounded(tensor))
    undecided = torch.full(tensor.shape, torch.inf, dtype=torch.float64) if counted.undecided else None
    return Found(tensor.detach().double(), undecided, counted.undecided or COPIED)
