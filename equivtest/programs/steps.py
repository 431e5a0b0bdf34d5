"""Names the tensors that a step of training leaves, and calls the function that makes a case's optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from equivtest.base.importing import load_named, require_arguments
from equivtest.errors import Misuse

TOTAL_NORM = "output.total_norm"


def updated(step: int, parameter: str) -> str:
    """Returns the name of a parameter after the update of a step: (2, 'weight') -> 'step2.param.weight'."""
    return f"step{step}.param.{parameter}"


def called_optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """Calls the function `name` to make an optimizer for the module."""
    function = cast("Callable[[nn.Module], object]", load_named(name, "optimizer"))
    require_arguments(function, f"optimizer {name!r}", ("module",))
    optimizer = function(module)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Misuse(f"optimizer {name!r} must give a torch.optim.Optimizer, got {type(optimizer).__name__}")
    return optimizer
