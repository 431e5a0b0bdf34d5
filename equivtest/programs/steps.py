"""Steps of training: what updates the parameters, how often, and what every rank does in one step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, cast

import torch
from torch import nn

from equivtest.base.importing import load_named, require_arguments
from equivtest.cases.case import Case, require
from equivtest.cases.rules import OneOf, Within
from equivtest.errors import Misuse

TOTAL_NORM = "output.total_norm"


@dataclass(frozen=True, kw_only=True, repr=False)
class StepCase(Case):
    """What a case says of steps; as it stands, there is one forward and backward, and nothing is updated.

    Attributes:
        optimizer: 'package.module:NAME' of a function (module) -> torch.optim.Optimizer, which is called with the
            parallel module on every rank, and with the unsharded one; '': parameters stay as they are.
        step: 'package.module:NAME' of a function (module, mesh, micro_batches, optimizer) -> outputs, which every rank
            calls once a step: it runs forward and backward on each of its micro-batches, a list of named inputs,
            updates the parameters where there is an optimizer, leaves in `grad` what it updated them by, and returns
            what it reports.  '': one forward and backward, `clip_grad_norm_` where there is a max_norm, and
            optimizer.step().
        steps: How many, each on inputs of its own.
        micro_batches: Into how many the rows of each rank are cut, or as many as the rank with the fewest rows has.
        max_norm: What the gradients are clipped to before the update, as torch.nn.utils.clip_grad_norm_ says; the step
            then reports total_norm, that of the gradients before, one of its outputs; 0: they are not clipped.
        norm_type: Of the norm: 1, 2 or math.inf.
    """

    optimizer: str = ""
    step: str = ""
    steps: Annotated[int, Within(1)] = 1
    micro_batches: Annotated[int, Within(1)] = 1
    max_norm: float = 0.0
    norm_type: Annotated[float, OneOf((1.0, 2.0, math.inf))] = 2.0

    def check_steps(self) -> None:
        """Raises Misuse unless the steps are as they can be."""
        require(self.steps == 1 or bool(self.optimizer), f"{self.steps} steps need an optimizer")
        require(
            self.micro_batches == 1 or bool(self.step),
            f"{self.micro_batches} micro_batches need a step, which says what is done with each",
        )
        require(0 <= self.max_norm < math.inf, f"max_norm must be 0 or more, and finite, got {self.max_norm}")
        require(not self.max_norm or bool(self.optimizer or self.step), "max_norm goes with an optimizer or a step")

    @property
    def trains(self) -> bool:
        return bool(self.optimizer)

    @property
    def is_stepped(self) -> bool:
        """Whether more is done than one forward and backward."""
        return bool(self.optimizer or self.step)

    @property
    def num_shares(self) -> int:
        """In how many parts a sum over the batch may be held before they are added up."""
        return self.world_size * self.micro_batches


def base_of(name: str) -> str:
    """The name of step 1: 'ids' of 'step2.ids'."""
    return re.sub(r"^step\d+\.", "", name)


def updated(step: int, parameter: str) -> str:
    """What a step's update leaves of a parameter."""
    return f"step{step}.param.{parameter}"


def called_optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """What the function of that name makes for a module.

    Raises:
        Misuse: there is no such function, or it makes no optimizer.
    """
    function = cast("Callable[[nn.Module], object]", load_named(name, "optimizer"))
    require_arguments(function, f"optimizer {name!r}", ("module",))
    optimizer = function(module)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Misuse(f"optimizer {name!r} must give a torch.optim.Optimizer, got {type(optimizer).__name__}")
    return optimizer
