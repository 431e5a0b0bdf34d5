"""Lets a planted defect name the step of a wrong class of steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.subject import Answers, Given
from equivtest.programs.case import ModuleCase
from equivtest.programs.examples.token_mean import TokenMean
from equivtest.programs.run.module import named_in, run_module


def step_named(name: str, module: Mapping[str, Any]) -> Any:
    """Returns the step 'step_NAME' of the class NAME of a module, for the module's `__getattr__`."""
    kind = module.get(name.removeprefix("step_"))
    if kind is None or not name.startswith("step_"):
        raise AttributeError(name)
    return kind.step


def run_step(case: ModuleCase, mesh: DeviceMesh, given: Given, kind: type[TokenMean]) -> Answers:
    """Runs the case with the step of `kind`, a class in a module with such a `__getattr__`."""
    return run_module(case.but(step=f"{kind.__module__}:step_{kind.__name__}"), mesh, given, named_in(case))
