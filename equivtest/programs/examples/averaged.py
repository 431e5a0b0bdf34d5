"""Training whose learning rate follows a schedule, and whose parameters become their average after the third update.

The parallel module resumes after the second update: the states of its optimizer, schedule and average are loaded into
new ones. The unsharded module goes on without.

Source: torch/optim/swa_utils.py, AveragedModel; torch/optim/lr_scheduler.py (2.13.0).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from equivtest.programs.examples.gated import BufferedBlock
from equivtest.programs.examples.plans import spoil


def _averager(make: Any, *decay: float) -> Any:
    return make(*decay)


AVERAGES: dict[str, Any] = {
    "mean": dict,
    "exponential": lambda: {"avg_fn": _averager(get_ema_avg_fn, 0.25), "use_buffers": True},
    "exponential of lists": lambda: {"multi_avg_fn": _averager(get_ema_multi_avg_fn, 0.25), "use_buffers": True},
}
"""Name -> arguments of `AveragedModel`. Without `use_buffers` the buffers are copied."""

SCHEDULES: dict[str, Any] = {
    "plateau": lambda inner: lr_scheduler.ReduceLROnPlateau(inner, factor=0.5, patience=1),
    "swa": lambda inner: SWALR(inner, swa_lr=0.125, anneal_epochs=2, anneal_strategy="linear"),
    "cosine": lambda inner: lr_scheduler.CosineAnnealingWarmRestarts(inner, T_0=2, T_mult=2),
    "cycle": lambda inner: lr_scheduler.OneCycleLR(inner, max_lr=0.5, total_steps=6, pct_start=0.5),
    "chained": lambda inner: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(inner, 0.5, total_iters=2), lr_scheduler.MultiStepLR(inner, [2], 0.5)]
    ),
    "in turn": lambda inner: lr_scheduler.SequentialLR(
        inner, [lr_scheduler.ConstantLR(inner, 0.5, total_iters=2), lr_scheduler.ExponentialLR(inner, 0.5)], [2]
    ),
}
"""Name -> function that makes the schedule of an optimizer."""

NUM_BEFORE_RESUME, NUM_BEFORE = 2, 3
"""Number of updates before the parallel module resumes, and before the averages become the parameters."""


class AveragedBlock(BufferedBlock):
    """A block with a buffer that names how it is averaged, and by which schedule it is trained.

    Args:
        average: A name in `AVERAGES`.
        schedule: A name in `SCHEDULES`.
    """

    def __init__(self, average: str, schedule: str) -> None:
        super().__init__(2, 5)
        self.average, self.schedule = average, schedule


def averaged_block(*, average: str, schedule: str) -> nn.Module:
    return AveragedBlock(average, schedule)


class Averaged(torch.optim.Optimizer):
    """SGD with a schedule of two groups' rates, and an average of the module.

    The average begins with NaN in its parameters and buffers. Its first update copies the module's.

    Attributes:
        inner: The optimizer that updates.
        num_updates: Number of updates so far.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.block, self.num_updates = module, getattr(module, "module", module), 0
        self.inner, self.schedule, self.average = self.made()
        super().__init__(self.inner.param_groups, {})

    def made(self) -> Any:
        trained = [each for each in self.module.parameters() if each.requires_grad]
        groups: list[dict[str, Any]] = [{"params": trained[:1], "lr": 0.25}, {"params": trained[1:]}]
        inner = torch.optim.SGD(groups, lr=0.5, momentum=0.5)
        average = AveragedModel(self.block, **AVERAGES[self.block.average]())
        spoil((*average.module.parameters(), *average.module.buffers()))
        return inner, SCHEDULES[self.block.schedule](inner), average

    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        self.average.update_parameters(self.block)
        is_measured = isinstance(self.schedule, lr_scheduler.ReduceLROnPlateau)
        self.schedule.step(*([1.0] if is_measured else []))
        self.num_updates += 1
        if self.num_updates == NUM_BEFORE_RESUME and self.block is not self.module:
            self.resume()
        if self.num_updates == NUM_BEFORE:
            self.block.load_state_dict(self.average.module.state_dict())

    def resume(self) -> None:
        states = [copy.deepcopy(each.state_dict()) for each in (self.inner, self.schedule, self.average)]
        self.inner, self.schedule, self.average = self.made()
        for each, state in zip((self.inner, self.schedule, self.average), states, strict=True):
            each.load_state_dict(state)


def averaged(module: nn.Module) -> torch.optim.Optimizer:
    return Averaged(module)
