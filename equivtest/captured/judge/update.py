"""What is right and wrong in an update that happened elsewhere, from what the ranks held when it began."""

from __future__ import annotations

from dataclasses import replace

import torch

from equivtest.captured.format.folder import AFTER, STATE, STATE_OF, CapturedRun
from equivtest.captured.judge.inputs import made_whole
from equivtest.cases.case import Shape, require
from equivtest.layout import Layout, Replicate
from equivtest.oracle.expected import Expected
from equivtest.programs.captured import UpdateCase
from equivtest.programs.oracle.update import Held, expect_update
from equivtest.tensors import Placed

Answers = dict[int, dict[str, Placed]]


def expect_captured_update(
    run: CapturedRun, reference: str, dtype: str
) -> tuple[UpdateCase, Expected, Answers, dict[str, torch.Tensor]]:
    """The case that an update is, what it should have left, what it left, and all that it was handed.

    Raises:
        Misuse: the run says what no update says.
    """
    told = run.manifest
    axes = told.axes or (("first", "second") if len(told.mesh) > 1 else ())
    case = UpdateCase(
        world_size=told.world_size,
        dtype=dtype,
        build=reference,
        parallelize=f"what ran in {run.folder}",
        axes=axes,
        mesh=told.mesh if axes else (),
        values=(("real", 0),),
        by_parts=True,
        poison="none",
        optimizer=f"torch.optim:{told.optimizer}",
    )
    whole = Layout((Replicate(),) * len(told.mesh))
    answers = {rank: {name: held.placed(name, whole) for name in held} for rank, held in run.held.items()}
    parameters = {
        name: Held(
            _whole(run, answers, f"param.{name}", each.shape),
            _whole(run, answers, f"grad.{name}", each.shape) if f"grad.{name}" in answers[0] else None,
            _state(run, answers, f"{STATE}{name}{STATE_OF}", each.shape),
        )
        for name, each in told.parameters.items()
    }
    named = [name for group in told.groups for name in group.parameters]
    require(
        len(set(named)) == len(named) and set(named) <= parameters.keys(),
        f"{run.folder}: its groups must name each of its parameters once at most, and no others",
    )
    found = expect_update(
        case, told.optimizer, [(group.parameters, group.options) for group in told.groups], parameters
    )
    tensors = {f"{AFTER}param.{name}": right for name, (right, _) in found.items()}
    tensors |= {
        f"{AFTER}{STATE}{name}{STATE_OF}{key}": right
        for name, (_, state) in found.items()
        for key, right in state.items()
    }
    case = replace(case, left=tuple((name, tuple(each.value.shape)) for name, each in tensors.items()))
    given = {f"param.{name}": each.value for name, each in parameters.items()}
    given |= {f"grad.{name}": each.gradient for name, each in parameters.items() if each.gradient is not None}
    given |= {
        f"{STATE}{name}{STATE_OF}{key}": value for name, each in parameters.items() for key, value in each.state.items()
    }
    return case, Expected(tensors, {}), answers, given


def _state(run: CapturedRun, answers: Answers, prefix: str, shape: Shape) -> dict[str, torch.Tensor]:
    """What the optimizer kept of a parameter: numbers, and tensors of its shape."""
    names = [name for name in answers[0] if name.startswith(prefix)]
    return {
        name.removeprefix(prefix): _whole(run, answers, name, shape if answers[0][name].local.dim() else ())
        for name in names
    }


def _whole(run: CapturedRun, answers: Answers, name: str, shape: Shape) -> torch.Tensor:
    return made_whole(run, answers, name, shape, name)
