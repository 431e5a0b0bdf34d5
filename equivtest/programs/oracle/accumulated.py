"""Computes the right values of several forwards and backwards, on different inputs, whose gradients add up."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from equivtest.oracle.expected import Expected, ExpectedTensor
from equivtest.oracle.held import Held, put_together
from equivtest.programs.captured import CapturedCase
from equivtest.programs.micro_batches import at_micro_batch, split_micro_batch
from equivtest.programs.oracle import answered
from equivtest.programs.oracle.factors import Ran, without_factors
from equivtest.programs.oracle.held import held_of_parts
from equivtest.programs.oracle.steps import added_up, taken_out
from equivtest.programs.oracle.unsharded import Tensors, reduced
from equivtest.programs.oracle.within import ran_within_bounds, within_bounds


class MicroBatch(NamedTuple):
    """One forward and backward of a captured run, with the tensors that the ranks recorded.

    Attributes:
        given: Whole inputs, parameters and cotangents, by name.
        held: Each rank's tensors of this micro-batch. Their names have no prefix such as 'micro2.'.
        buffers: Replacements of the module's buffers in each part of the batch, by name.
    """

    case: CapturedCase
    given: Tensors
    held: Held
    buffers: Sequence[Tensors]


def expect_accumulated(micro_batches: Sequence[MicroBatch]) -> Expected:
    """Returns the right value of every tensor of all micro-batches, under the names that `at_micro_batch` makes.

    A parameter has one gradient. For each micro-batch, the gradients of the parts of the batch are added up or
    averaged, and the results are added up over all micro-batches. The bound of this sum allows any order of additions.
    A program may add over the micro-batches first, or over the ranks first.
    """

    def held(name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        number, own = split_micro_batch(name)
        each = micro_batches[number - 1]
        return put_together(each.held, own, shape, each.case.mesh_shape)

    return without_factors(functools.partial(_accumulated, micro_batches), held)


def _accumulated(micro_batches: Sequence[MicroBatch], takes_factors: bool) -> Ran:  # noqa: FBT001
    ran = [
        ran_within_bounds(
            each.case, each.given, held_of_parts(each.case, each.held), each.buffers, takes_factors=takes_factors
        )
        for each in micro_batches
    ]
    counted, case = ran[-1].counted, micro_batches[0].case
    counted.undecided = next((each.counted.undecided for each in ran if each.counted.undecided), "")
    with counted:
        sums = {
            name: reduced(case, torch.cat([each.stacks[name] for each in ran if name in each.stacks]))
            for name in dict.fromkeys(name for each in ran for name in each.stacks)
        }
    runs = [run for each in ran for run in each.runs]
    sums = {name: taken_out(counted, total, runs) for name, total in sums.items()}
    totals = {name: within_bounds(counted, added_up(counted, total, len(ran))) for name, total in sums.items()}
    tensors: dict[str, ExpectedTensor] = {}
    for number, (each, own) in enumerate(zip(micro_batches, ran, strict=True), 1):
        rows = {name: within_bounds(own.counted, tensor) for name, tensor in own.rows.items()}
        right = answered(each.case, each.given, rows | totals, own.runs).tensors
        names = [name for name in right if number == 1 or not each.case.is_of_all(name)]
        tensors |= {at_micro_batch(number, name): right[name] for name in names}
    return Expected(tensors, {}), runs
