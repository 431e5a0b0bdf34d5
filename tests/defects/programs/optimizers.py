"""Trainings by many optimizers that are wrong in one way each."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.subject import Answers, Given
from equivtest.programs.case import MEAN_OF_PARTS, ModuleCase
from equivtest.programs.examples.optimizers import Together, by_all
from equivtest.programs.run.module import named_in, run_module
from tests.defects.defect import Replacing

wrong = Replacing("module")

_VARIED = ModuleCase(
    world_size=2,
    build="equivtest.programs.examples.optimizers:many_trained(options='varied', fused='')",
    parallelize="equivtest.programs.examples.plans:fully_sharded",
    x_shape=(5, 2),
    batch=MEAN_OF_PARTS,
    optimizer="equivtest.programs.examples.optimizers:by_all",
    steps=2,
    values=(("real", 0),),
)


def trained_by(optimizer: str, case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    return run_module(case.but(optimizer=optimizer), mesh, given, named_in(case))


def without_last(module: Any) -> torch.optim.Optimizer:
    made = by_all(module)
    assert isinstance(made, Together)
    made.optimizers.pop()
    made.late.pop()
    return made


def without_options(module: Any) -> torch.optim.Optimizer:
    module.options = "plain"
    return by_all(module)


@wrong("a step left out", _VARIED, "any case has every optimizer", claim="trains_like_unsharded")
def parameter_of_one_optimizer_not_updated(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Makes no update by the last optimizer."""
    return trained_by(f"{__name__}:without_last", case, mesh, given)


@wrong("flags", _VARIED, "the other options are these", claim="trains_like_unsharded")
def options_of_optimizers_forgotten(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Gives each optimizer the options of the other variant."""
    return trained_by(f"{__name__}:without_options", case, mesh, given)
