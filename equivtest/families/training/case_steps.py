"""Defines `TrainingCase`: the optimizer, the number of steps, and the clipping of gradients before each update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from equivtest.cases.case import Case, require
from equivtest.cases.rules import OneOf, Within

OPTIMIZERS = ("none", "sgd", "adamw")
VARIANTS = ("", "nesterov", "dampened", "amsgrad", "maximize")
BETWEEN = ("", "reload", "halve", "warm_up")
DAMPENING = 0.5
"""The dampening of the variant 'dampened'."""
NORM_TYPES = ("2", "1", "inf")
MAX_STEPS = 16


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainingCase(Case):
    """Describes one forward and backward, or several steps with an optimizer's update after each.

    Attributes:
        optimizer: The optimizer that updates the parameters. If 'none', the case has only one forward and backward.
        steps: Number of steps. With an optimizer there are at least 2 steps, each with a forward, a backward and an
            update. Without an optimizer there is 1 step.
        lr, momentum, weight_decay, foreach: Arguments of the optimizer. Only SGD has a momentum.
        variant: An option of the optimizer. SGD with a momentum may have 'nesterov' or 'dampened', which sets the
            dampening DAMPENING. AdamW may have 'amsgrad'. Both optimizers may have 'maximize'. If '', the optimizer has
            none of these options.
        between_steps: An action after each update. If 'reload', a new optimizer with another learning rate loads the
            state of the old optimizer. If 'halve', a schedule halves the learning rate. If 'warm_up', the first two
            steps have 1/4 and 1/2 of the learning rate, and then another schedule begins, which halves it. If '', there
            is no action.
        clip_norm: Gradients are scaled before each update so that their norm over all parameters is at most about this
            number. If 0, gradients are not clipped.
        norm_type: Type of the norm: '1', '2' or 'inf'.
    """

    optimizer: Annotated[str, OneOf(OPTIMIZERS)] = "none"
    steps: int = 1
    lr: float = 0.25
    momentum: float = 0.0
    weight_decay: Annotated[float, Within(0, 1)] = 0.0
    foreach: bool = False
    variant: Annotated[str, OneOf(VARIANTS)] = ""
    between_steps: Annotated[str, OneOf(BETWEEN)] = ""
    clip_norm: float = 0.0
    norm_type: Annotated[str, OneOf(NORM_TYPES)] = "2"

    def check_fields(self) -> None:
        super().check_fields()
        self._check_clipping()
        if self.trains:
            self._check_optimizer()
        else:
            require(not self.clips, f"gradients are clipped before an update: set optimizer, got {self.clip_norm}")
            require(self.steps == 1, f"steps must be 1 without an optimizer, got {self.steps}")
            for name in ("variant", "between_steps"):
                require(
                    not getattr(self, name),
                    f"{name} is an option of an optimizer: set optimizer, got {getattr(self, name)!r}",
                )

    def _check_clipping(self) -> None:
        require(0 <= self.clip_norm < math.inf, f"clip_norm must be at least 0 and finite, got {self.clip_norm}")
        require(self.clips or self.norm_type == "2", "norm_type needs clipping: set clip_norm")

    def _check_optimizer(self) -> None:
        require(2 <= self.steps <= MAX_STEPS, f"steps must be in 2..{MAX_STEPS} with an optimizer, got {self.steps}")
        require(0 < self.lr <= 1, f"lr must be above 0 and at most 1, got {self.lr}")
        require(0 <= self.momentum < 1, f"momentum must be at least 0 and below 1, got {self.momentum}")
        require(self.momentum == 0 or self.optimizer == "sgd", f"only SGD has a momentum, got one for {self.optimizer}")
        require(
            self.variant not in ("nesterov", "dampened") or self.momentum > 0,
            f"variant {self.variant!r} needs momentum, got 0",
        )
        require(self.variant != "amsgrad" or self.optimizer == "adamw", f"only AdamW has amsgrad, got {self.optimizer}")
        require(
            self.optimizer != "adamw" or self.dtype != "float16",
            "AdamW's eps of 1e-8 is zero in float16, so that a gradient of zero gives 0 / 0: use another dtype",
        )

    @property
    def trains(self) -> bool:
        return self.optimizer != "none"

    @property
    def clips(self) -> bool:
        return self.clip_norm > 0

    @property
    def norm_axes(self) -> tuple[int, ...]:
        """Numbers of ranks along the mesh axes over which the norm of the gradients is reduced."""
        return self.mesh_shape

    def lr_at(self, step: int) -> float:
        """Returns the learning rate of update number `step`, counted from 1."""
        if self.between_steps == "warm_up":
            return self.lr * (step / 4 if step < 3 else 0.5 ** (step - 3))
        return self.lr * 0.5 ** (step - 1) if self.between_steps == "halve" else self.lr

    def state_names(self) -> tuple[str, ...]:
        """Returns 'param', then the names of the optimizer's states."""
        if self.optimizer == "adamw":
            return ("param", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.variant == "amsgrad" else ()))
        return ("param", "momentum") if self.momentum else ("param",)
