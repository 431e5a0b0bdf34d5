"""Learning rates that are the mean of the rates of many schedules, so that a wrong schedule changes every rate.

Each schedule has an optimizer without gradients. A parallel module resumes: the states of all optimizers and schedules
are loaded into new ones.

Source: torch/optim/lr_scheduler.py; SWALR, AveragedModel and update_bn in torch/optim/swa_utils.py (2.13.0).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn
from torch.utils._python_dispatch import _disable_current_modes

BASES, OTHER_BASES = (0.25, 0.5), (1.0, 2.0)
"""Rates of the two groups before any schedule, and before a state is loaded."""


class Decay:
    """A function of the number of steps, whose factor grows with each call. A state keeps the factor."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, number: float) -> float:
        self.factor *= 1.125
        return 1 / (1 + self.factor * number)


def _in_turn(inner: Any) -> Any:
    """Makes schedules in turn. The parallel module resumes during the third, which has a state.

    The last is no ChainedScheduler and no SequentialLR, because torch raises if such a schedule is not the first.
    """
    schedules = [
        lr_scheduler.LinearLR(inner, 0.5, total_iters=2),
        lr_scheduler.ConstantLR(inner, 0.75, total_iters=1),
        lr_scheduler.CosineAnnealingWarmRestarts(inner, T_0=1, T_mult=2, eta_min=0.125),
        lr_scheduler.LambdaLR(inner, [Decay(0.5), Decay(0.25)]),
    ]
    return lr_scheduler.SequentialLR(inner, schedules, [1, 2, 8])


def _begun(inner: Any) -> Any:
    """Returns the optimizer with other rates than its initial ones, as a schedule after some steps has left it."""
    for group in inner.param_groups:
        group["initial_lr"] = group["lr"]
        group["lr"] = group["lr"] * 0.75
    return inner


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambdas": lambda inner: lr_scheduler.LambdaLR(inner, [Decay(0.5), Decay(0.25)]),
    "products": lambda inner: lr_scheduler.MultiplicativeLR(inner, [Decay(0.125), Decay(0.25)]),
    "steps": lambda inner: lr_scheduler.StepLR(inner, 3, 0.5),
    "milestones": lambda inner: lr_scheduler.MultiStepLR(inner, [1, 3, 3, 5], 0.75),
    "constant": lambda inner: lr_scheduler.ConstantLR(inner, 0.5, total_iters=5),
    "linear": lambda inner: lr_scheduler.LinearLR(inner, 0.25, 0.75, total_iters=6),
    "exponential": lambda inner: lr_scheduler.ExponentialLR(inner, 0.875),
    "polynomial": lambda inner: lr_scheduler.PolynomialLR(inner, total_iters=7, power=2.0),
    "cosine": lambda inner: lr_scheduler.CosineAnnealingLR(inner, T_max=3, eta_min=0.0625),
    "restarts": lambda inner: lr_scheduler.CosineAnnealingWarmRestarts(inner, T_0=1, T_mult=2, eta_min=0.0625),
    "in turn": _in_turn,
    "chained": lambda inner: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(inner, 0.5, total_iters=5), lr_scheduler.MultiStepLR(inner, [2, 6], 0.5)], inner
    ),
    "cycles": lambda inner: lr_scheduler.CyclicLR(
        inner, [0.125, 0.25], [0.5, 0.75], step_size_up=1, step_size_down=2, mode="triangular2", max_momentum=0.95
    ),
    "cycles by iterations": lambda inner: lr_scheduler.CyclicLR(
        inner, 0.125, 0.5, step_size_up=2, mode="exp_range", gamma=0.75, base_momentum=0.5
    ),
    "cycles of a function": lambda inner: lr_scheduler.CyclicLR(
        inner, 0.125, 0.5, step_size_up=2, scale_fn=Decay(0.5), scale_mode="iterations", cycle_momentum=False
    ),
    "one cycle": lambda inner: lr_scheduler.OneCycleLR(
        inner, max_lr=[0.5, 0.75], total_steps=12, pct_start=0.5, div_factor=4.0, final_div_factor=8.0
    ),
    "three phases": lambda inner: lr_scheduler.OneCycleLR(
        inner, 0.5, epochs=3, steps_per_epoch=4, anneal_strategy="linear", three_phase=True,
        base_momentum=0.5, max_momentum=0.75,
    ),
    "averaging": lambda inner: SWALR(
        inner, swa_lr=cast("Any", [0.125, 0.0625]), anneal_epochs=8, anneal_strategy="linear"
    ),
    "averaging by cosine": lambda inner: SWALR(inner, swa_lr=0.125, anneal_epochs=6),
    "plateau": lambda inner: lr_scheduler.ReduceLROnPlateau(
        inner, factor=0.5, patience=1, threshold=0.25, cooldown=1, eps=0.1
    ),
    "high plateau": lambda inner: lr_scheduler.ReduceLROnPlateau(
        inner, "max", factor=0.5, patience=0, threshold=0.5, threshold_mode="abs", min_lr=[0.1875, 0.0625]
    ),
    "steps from 2": lambda inner: lr_scheduler.StepLR(_begun(inner), 2, 0.5, last_epoch=2),
    "linear from 1": lambda inner: lr_scheduler.LinearLR(_begun(inner), 0.5, 0.75, total_iters=5, last_epoch=1),
    "cosine from 2": lambda inner: lr_scheduler.CosineAnnealingLR(
        _begun(inner), T_max=5, eta_min=0.0625, last_epoch=2
    ),
    "even restarts": lambda inner: lr_scheduler.CosineAnnealingWarmRestarts(inner, T_0=3, eta_min=0.0625),
    "cycles from 3": lambda inner: lr_scheduler.CyclicLR(
        _begun(inner), 0.125, 0.5, step_size_up=2, base_momentum=0.5, last_epoch=3
    ),
}  # fmt: skip
"""Name -> function that makes the schedule of an optimizer with two groups."""
OF_BETAS = ("cycles by iterations", "three phases")
"""Schedules of an optimizer whose momentum is the first of two betas."""
OF_TENSORS = ("lambdas", "exponential", "in turn", "averaging by cosine")
"""Schedules of an optimizer whose rates are tensors."""
CLOSED = (
    "steps",
    "milestones",
    "constant",
    "linear",
    "exponential",
    "polynomial",
    "cosine",
    "restarts",
    "even restarts",
)
"""Schedules that jump to a number of steps at the end."""
METRICS = (1.0, 0.8, 0.78, 1.25, 0.5, 1.0, 2.0, 2.25, 1.0)
"""Measurements before the steps of a plateau, over and over."""
NUM_PER_UPDATE, NUM_BEFORE_JUMP, JUMP = 3, 9, 4
"""Number of steps of each schedule for one update, and before a jump, and the number to which the jump goes."""
KEYS = ("lr", "momentum")


class Rates:
    """Two groups' options, each the mean over all schedules and over their steps since the last update.

    Attributes:
        num_steps: Number of steps of each schedule so far.
        statistic: A number between 0 and 1 that counts as a momentum.
        means: The mean over all schedules, after each step since the last update.
    """

    @_disable_current_modes()  # no schedule depends on a tensor of the module
    def __init__(self, bases: tuple[float, ...] = BASES) -> None:
        self.num_steps, self.statistic = 0, _statistic()
        self.optimizers = {name: _optimizer_of(name, bases) for name in SCHEDULES}
        self.schedules = {name: make(self.optimizers[name]) for name, make in SCHEDULES.items()}
        self.means = [self.mean()]

    def options(self) -> list[dict[str, float]]:
        return [
            {key: _mean([each[number][key] for each in self.means]) for key in KEYS} for number in range(len(BASES))
        ]

    def mean(self) -> list[dict[str, float]]:
        groups = zip(*(each.param_groups for each in self.optimizers.values()), strict=True)
        last = zip(*(each.get_last_lr() for each in self.schedules.values()), strict=True)
        return [
            {
                "lr": _mean([float(rate) for rate in (*rates, *(group["lr"] for group in alike))]),
                "momentum": _mean([self.statistic, *(_momentum(group) for group in alike)]),
            }
            for alike, rates in zip(groups, last, strict=True)
        ]

    @_disable_current_modes()
    def step(self) -> None:
        self.means = []
        for _ in range(NUM_PER_UPDATE):
            for name, schedule in self.schedules.items():
                self.optimizers[name].step()
                is_measured = isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
                schedule.step(*([METRICS[self.num_steps % len(METRICS)]] if is_measured else []))
            self.num_steps += 1
            self.means.append(self.mean())
        if self.num_steps == NUM_BEFORE_JUMP:
            self.jump()
            self.means.append(self.mean())

    def jump(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch advises against a step to a number
            for name in CLOSED:
                self.schedules[name].step(JUMP)

    def state_dict(self) -> dict[str, Any]:
        parts = (self.optimizers, self.schedules)
        return {
            "num_steps": self.num_steps,
            "means": self.means,
            "parts": [{name: each.state_dict() for name, each in part.items()} for part in parts],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps, self.means = state["num_steps"], state["means"]
        for part, states in zip((self.optimizers, self.schedules), state["parts"], strict=True):
            for name, each in part.items():
                each.load_state_dict(states[name])


def _optimizer_of(name: str, bases: tuple[float, ...]) -> torch.optim.Optimizer:
    rates: list[Any] = [torch.tensor(each) if name in OF_TENSORS else each for each in bases]
    groups = [{"params": [nn.Parameter(torch.zeros(()))], "lr": rate} for rate in rates]
    if name in OF_BETAS or name in OF_TENSORS:
        return torch.optim.Adam(groups, foreach=False)
    return torch.optim.SGD(groups, momentum=0.5, foreach=False)


def _statistic() -> float:
    """Returns the mean of all buffers of two layers and their averages, after batches and `update_bn`.

    One of the layers has no momentum. The averages have buffers of two dtypes, for which `get_swa_multi_avg_fn` raises
    (finding 169).
    """
    model = nn.Sequential(nn.BatchNorm1d(2, momentum=0.5), nn.BatchNorm1d(2, momentum=None)).double()
    first, *batches = [torch.linspace(-1, number, 8, dtype=torch.float64).view(4, 2) for number in range(4)]
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"avg_fn": get_ema_avg_fn(0.25)},  # type: ignore[no-untyped-call]
        {"multi_avg_fn": get_ema_multi_avg_fn(0.25)},  # type: ignore[no-untyped-call]
    )
    averages: list[Any] = [AveragedModel(model, use_buffers=True, **way) for way in ways]
    for batch in (first, *batches) * 2:
        model(batch)
        for average in averages:
            average.update_parameters(model)
    update_bn([batches[0], *((batch, "unused") for batch in batches[1:])], model.eval())
    model(first)  # changes nothing
    model[0].train()
    model(first)
    buffers = [each.double().flatten() for part in (model, *averages) for each in part.buffers()]
    return float(torch.cat(buffers).mean()) / 8


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _momentum(group: dict[str, Any]) -> float:
    return float(group["betas"][0] if "betas" in group else group["momentum"])
