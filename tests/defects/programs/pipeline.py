"""Pipelines that are wrong in one way each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from equivtest.cases.subject import Answers, Given
from equivtest.programs.case import ModuleCase
from equivtest.programs.examples.pipeline import Chain
from equivtest.programs.examples.pipeline_plan import Pipeline, scheduled
from equivtest.programs.run.module import named_in, run_module
from tests.defects.defect import Replacing

wrong = Replacing("module")

_PLAN = "equivtest.programs.examples.pipeline_plan"
_TWO_STAGES = ModuleCase(
    world_size=2,
    build="equivtest.programs.examples.pipeline:chain(takes_mean=False)",
    parallelize=f"{_PLAN}:pipelined(schedule='1F1B', infers=False)",
    inputs=(("x", "real", ("batch", 2)), ("weights", "real", ("batch", 2))),
    sizes=(("batch", 8),),
    optimizer="equivtest.programs.examples.mixture:sgd",
    step=f"{_PLAN}:scheduled",
    steps=2,
    values=(("real", 0),),
)


class Scaled(Pipeline):
    """Divides summed gradients by the number of micro-batches."""

    def make_schedule(self, batch: torch.Tensor) -> Any:
        schedule = super().make_schedule(batch)
        schedule.scale_grads = not schedule.scale_grads
        return schedule


class Reversed(Pipeline):
    """Runs the layers of each stage in reverse order."""

    def make_stage(self, number: int, layers: list[nn.Module], batch: torch.Tensor) -> PipelineStage:
        return super().make_stage(number, layers[::-1], batch)


def scaled(chain: Chain, mesh: DeviceMesh, *, schedule: str, infers: bool) -> nn.Module:
    return Scaled(chain, mesh, schedule, infers=infers)


def reversed_layers(chain: Chain, mesh: DeviceMesh, *, schedule: str, infers: bool) -> nn.Module:
    return Reversed(chain, mesh, schedule, infers=infers)


def kept(
    module: Any, mesh: DeviceMesh, micro_batches: Any, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]  # as a step that forgets it
    return scheduled(module, mesh, micro_batches, optimizer)


def _planned(plan: str, case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    changed = case.but(parallelize=f"{__name__}:{plan}({case.parallelize.partition('(')[2]}")
    return run_module(changed, mesh, given, named_in(changed))


@wrong("wrong divisor or wrong group", _TWO_STAGES, "any sum shows it", claim="gradients_equal_unsharded")
def summed_gradients_divided(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Divides summed gradients by the number of micro-batches."""
    return _planned("scaled", case, mesh, given)


@wrong("shard order", _TWO_STAGES, "each of two stages has four layers")
def layers_of_stages_reversed(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Runs the layers of each stage in reverse order."""
    return _planned("reversed_layers", case, mesh, given)


@wrong(
    "state across steps", _TWO_STAGES, "the second step has the gradients of the first", claim="trains_like_unsharded"
)
def gradients_of_pipeline_kept(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Adds the gradients of each step to the gradients of the step before."""
    return run_module(case.but(step=f"{__name__}:kept"), mesh, given, named_in(case))
