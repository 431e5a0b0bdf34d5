"""Pipelines that are wrong in one way each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.subject import Answers, Given
from equivtest.programs.case import PARTS_OF_WHOLE, ModuleCase
from equivtest.programs.examples.pipeline import Chain
from equivtest.programs.examples.pipeline_plan import Pipeline, Stage, scheduled, sharded_scheduled, with_sharded_stages
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
_SHARDED = ModuleCase(
    world_size=2,
    dtype="float64",
    build="equivtest.programs.examples.pipeline:mean_chain",
    parallelize=f"{_PLAN}:sharded_pipelined(counts=True, dim=0, schedule='1F1B')",
    inputs=(("x", "real", ("batch", 2, 2)), ("weights", "real", ("batch", 2, 2))),
    sizes=(("batch", 16),),
    batch=PARTS_OF_WHOLE,
    axes=("pp", "dp"),
    batch_axis="dp",
    mesh=(2, 1),
    optimizer="equivtest.programs.examples.mixture:sgd",
    step=f"{_PLAN}:sharded_scheduled",
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

    def make_stage(self, number: int, stage: Stage, row: torch.Tensor) -> Any:
        return super().make_stage(number, Stage([*stage.layers][::-1], passes=stage.passes, is_last=stage.is_last), row)


def scaled(chain: Chain, mesh: DeviceMesh, *, schedule: str, infers: bool) -> nn.Module:
    return Scaled(chain, mesh, schedule, infers=infers)


def sharded_and_scaled(
    chain: Chain, mesh: DeviceMesh, *, schedule: str, counts: bool, dim: int, data: str = "stages"
) -> nn.Module:
    pipeline = Scaled(chain, mesh["pp"], schedule, infers=False, counts=counts, dim=dim)
    return with_sharded_stages(pipeline, mesh, data=data)


def counted_by_all(
    module: Any, mesh: DeviceMesh, micro_batches: Any, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    step, num_ranks = module.whole_loss, mesh["dp"].size()
    module.whole_loss = lambda output, weights, num_rows=0: step(output, weights, num_rows * num_ranks)
    results = sharded_scheduled(module, mesh, micro_batches, optimizer)
    module.whole_loss = step
    return results


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


@wrong("wrong divisor or wrong group", _SHARDED, "each rank has a stage", claim="gradients_equal_unsharded")
def counted_loss_averaged(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Divides the gradients of a loss that was divided by the number of rows by the number of micro-batches too."""
    return _planned("sharded_and_scaled", case, mesh, given)


@wrong("wrong divisor or wrong group", _SHARDED.but(mesh=(1, 2)), "two ranks have rows")
def counted_loss_of_all_ranks(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Divides the loss by the number of rows of all ranks, although FSDP2 averages over the ranks."""
    return run_module(case.but(step=f"{__name__}:counted_by_all"), mesh, given, named_in(case))
