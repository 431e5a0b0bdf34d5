"""What a captured run answers of the case that it is, as ranks of the harness would have answered it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from equivtest.captured.format.folder import CapturedRun, RankHeld
from equivtest.captured.judge.inputs import buffers, case_of, cotangent, is_whole, made_whole, started_in
from equivtest.cases.case import require
from equivtest.layout import UNTOLD
from equivtest.programs.boundaries import is_boundary
from equivtest.programs.captured import CapturedCase
from equivtest.programs.case import cotangent_of
from equivtest.programs.micro_batches import at_micro_batch, split_micro_batch
from equivtest.programs.oracle.accumulated import MicroBatch
from equivtest.programs.outputs import OUTPUT
from equivtest.tensors import Placed

Held = dict[int, dict[str, Placed]]


def micro_batches_of(run: CapturedRun, reference: str) -> list[MicroBatch]:
    """Each forward and backward of a run, beside the unsharded model that `reference` builds.

    Raises:
        Misuse: the run's files say what no run says.
    """
    return [_micro_batch(each, reference) for each in run.micro_batches()]


def _micro_batch(run: CapturedRun, reference: str) -> MicroBatch:
    case, inputs = case_of(run, reference)
    _check_started(run, case)
    held = {rank: _answers(case, each) for rank, each in run.held.items()}
    given = {name: torch.cat(parts) if name in case.divided_names() else parts[0] for name, parts in inputs.items()}
    for name in case.parameter_names():
        given[name] = made_whole(run, held, f"param.{name}", case.facts.parameters[name].shape, f"parameter {name}")
    given |= {cotangent_of(name): cotangent(run, case, name) for name in case.started}
    return MicroBatch(case, given, held, buffers(run, case))


def case_of_all(micro_batches: list[MicroBatch]) -> CapturedCase:
    """The case that they are together."""
    return micro_batches[0].case.with_further([each.case for each in micro_batches[1:]])


def held_of_all(micro_batches: list[MicroBatch]) -> Held:
    """What each rank held in all of them, by the names of that case."""
    return {
        rank: {
            at_micro_batch(number, name): placed
            for number, each in enumerate(micro_batches, 1)
            for name, placed in each.held[rank].items()
            if number == 1 or not each.case.is_of_all(name)
        }
        for rank in micro_batches[0].held
    }


def given_to_all(micro_batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
    """Whole inputs, parameters and cotangents of all of them, likewise."""
    return {
        at_micro_batch(number, name): tensor
        for number, each in enumerate(micro_batches, 1)
        for name, tensor in each.given.items()
        if number == 1 or not each.case.is_of_all(name)
    }


def flags_of(held: RankHeld, answers: Mapping[str, Placed]) -> dict[str, bool]:
    """Whether each output has a gradient: one that is cut off begins no backward, which nothing else would show."""
    names = [name for name in answers if split_micro_batch(name)[1].split(".")[0] == OUTPUT]
    return {name: held.told(name).requires_grad for name in names}


def touched_on(held: RankHeld) -> tuple[str, ...]:
    """What a rank's forwards and backwards changed of what they were handed, one sentence each."""
    return tuple(f"{name}: values have changed" for name in held.manifest.touched)


def _check_started(run: CapturedRun, case: CapturedCase) -> None:
    """Raises Misuse unless all ranks began their backward at the same outputs, and the reference has these."""
    for rank, held in run.held.items():
        own = started_in(held)
        require(
            own == case.started,
            f"{run.folder}: on rank 0 a gradient came to {', '.join(case.started) or 'no output'}, on rank {rank} to "
            f"{', '.join(own) or 'none'}",
        )
    require(bool(case.started), f"{run.folder}: no gradient came to an output: call backward within the block")
    unknown = [name for name in case.started if name not in case.facts.outputs]
    require(not unknown, f"{run.folder}: the run's model gives {''.join(unknown[:1])}, {case.build} does not")


def _answers(case: CapturedCase, held: RankHeld) -> dict[str, Placed]:
    """What a rank held of what is judged, as a rank of the harness would answer it."""
    names, stacked, layouts = set(case.answer_names()), set(case.stacked_names()), case.layouts()
    answers = {}
    for name in held:
        if name not in names:
            continue
        placed = held.placed(name, UNTOLD if is_boundary(name) else layouts[name])
        says_all = all(held.told(name).layout)
        if is_boundary(name) and (case.is_divided or not says_all):
            local = placed.local.unsqueeze(0) if case.is_divided else placed.local
            placed = Placed(local, UNTOLD)
        elif name in stacked:
            placed = Placed(placed.local.unsqueeze(0), layouts[name])
        elif not says_all and is_whole(placed.layout) and not name.startswith(("param.", "grad.")):
            placed = Placed(placed.local, layouts[name])
        answers[name] = placed
    return answers
