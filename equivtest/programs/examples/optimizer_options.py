"""Options of ten elementwise optimizers of torch.optim, for two groups each.

Source: torch/optim (2.13.0), the options of each class.
"""

from __future__ import annotations

from typing import Any

import torch

DECAYED = {"weight_decay": 0.25}
BETAS, LATER_BETAS = {"betas": (0.5, 0.75)}, {"betas": (0.25, 0.875)}
UNLIKE: dict[str, dict[str, dict[str, Any]]] = {
    "ASGD": {
        "plain": {"lambd": 0.25, "alpha": 2.0, "t0": 1.0},
        "varied": {**DECAYED, "lambd": 0.0, "t0": 0.0, "maximize": True},
    },
    "Adadelta": {"plain": {"rho": 0.75, "eps": 0.25}, "varied": {**DECAYED, "rho": 0.5, "eps": 0.5, "maximize": True}},
    "Adagrad": {"plain": {"lr_decay": 0.25}, "varied": {**DECAYED, "maximize": True}},
    "Adam": {"plain": {**BETAS, **DECAYED}, "varied": {**LATER_BETAS, "amsgrad": True, "maximize": True}},
    "AdamW": {
        "plain": {**BETAS, **DECAYED},
        "varied": {**LATER_BETAS, "weight_decay": 0.5, "amsgrad": True, "maximize": True},
    },
    "Adamax": {"plain": BETAS, "varied": {**LATER_BETAS, **DECAYED, "maximize": True}},
    "NAdam": {
        "plain": BETAS,
        "varied": {**LATER_BETAS, **DECAYED, "decoupled_weight_decay": True, "momentum_decay": 0.5, "maximize": True},
    },
    "RAdam": {
        "plain": {"betas": (0.5, 0.875), **DECAYED, "decoupled_weight_decay": True},
        "varied": {"betas": (0.25, 0.875), "weight_decay": 0.5, "maximize": True},
    },
    "RMSprop": {
        "plain": {"momentum": 0.5, "alpha": 0.75},
        "varied": {**DECAYED, "alpha": 0.5, "centered": True, "eps": 0.25, "maximize": True},
    },
    "SGD": {
        "plain": {**DECAYED, "momentum": 0.5, "dampening": 0.25},
        "varied": {"momentum": 0.25, "nesterov": True, "maximize": True},
    },
}
"""Optimizer -> name of a set of options -> the options in which it differs from `COMMON`.

ASGD keeps its learning rate in float32, as lr / (1 + lambd * lr * step) ** alpha.  With most options the loop and
foreach round it differently (finding 61).  With these the denominator is exact.
"""
COMMON, LATER_COMMON = {"lr": 0.125, "eps": 0.125}, {"lr": 0.25, "eps": 0.0625}
"""Options of the first group of an optimizer, and of the second."""
DEFAULTS = {"Adagrad": {"initial_accumulator_value": 0.25}}
"""Options that torch takes from the optimizer's defaults, even if a group has them."""
ROUNDED = ("ASGD", "NAdam")
"""The optimizers that resume only in float32. In another dtype torch changes a number in their states (finding 161)."""
WITHOUT_EPS = frozenset({"ASGD", "SGD"})


def new(kind: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = kind(groups, **DEFAULTS.get(kind.__name__, {}))
    return made


def options_of(name: str, options: str, common: dict[str, Any]) -> dict[str, Any]:
    taken = {key: value for key, value in common.items() if key != "eps" or name not in WITHOUT_EPS}
    return taken | UNLIKE[name][options]
