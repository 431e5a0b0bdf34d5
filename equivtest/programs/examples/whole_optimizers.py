"""Training of fixed tensors by optimizers whose updates no bound follows: they are not elementwise, or not continuous.

Each optimizer fits small tensors in float64, so that its result is one number. A rank may train by lists of tensors
(foreach), and resumes: after two updates the state is loaded into a new optimizer. The unsharded module's optimizer
loops over the tensors, and does not resume. DTensors are not trained, because Rprop raises on them.

Source: torch/optim/lbfgs.py, rprop.py, _adafactor.py, _muon.py, sparse_adam.py, adagrad.py and sgd.py (2.13.0).
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Rprop": (
        {"lr": 0.25, "etas": (0.25, 1.5), "step_sizes": (0.125, 0.5)},
        {"lr": 0.125, "etas": (0.5, 2.0), "step_sizes": (0.0625, 0.25), "maximize": True},
    ),
    "Adafactor": (
        {"lr": 0.5, "beta2_decay": -0.5, "eps": (0.25, 0.125), "d": 0.5, "weight_decay": 0.25},
        {"lr": 0.0625, "eps": (None, 0.25), "d": 4.0, "maximize": True},
    ),
    "Muon": (
        {"lr": 0.25, "weight_decay": 0.25, "momentum": 0.5, "ns_steps": 3},
        {
            "lr": 0.125,
            "nesterov": False,
            "adjust_lr_fn": "match_rms_adamw",
            "eps": 0.5,
            "ns_coefficients": (2.0, -1.5, 0.5),
        },
    ),
    "LBFGS": ({"lr": 0.25, "max_iter": 3, "history_size": 2}, {}),
    "LBFGS by lines": ({"lr": 1.0, "max_iter": 4, "history_size": 3, "line_search_fn": "strong_wolfe"}, {}),
    "SparseAdam": ({"lr": 0.25, "betas": (0.5, 0.75), "eps": 0.25}, {"lr": 0.125, "maximize": True}),
    "Adagrad": ({"lr": 0.25, "lr_decay": 0.25, "eps": 0.25}, {"lr": 0.125, "maximize": True}),
    "SGD": ({"lr": 0.25}, {"lr": 0.015625, "maximize": True}),
}
"""Name -> options of two groups. torch's LBFGS has one group."""
LISTED = ("Rprop", "Adafactor")
"""Optimizers that have an implementation by lists."""
SPARSE = ("SparseAdam", "Adagrad", "SGD")
"""Optimizers that get sparse gradients, with a row that occurs twice."""
NUM_UPDATES, NUM_BEFORE_RESUME = 5, 2


@_disable_current_modes()  # no tensor of the module takes part
def trained_number(*, lists: bool, resumes: bool) -> float:
    """Returns the sum of all elements that the optimizers have trained, each with another weight."""
    kept = [trained(name, lists=lists, resumes=resumes) for name in OPTIONS]
    whole = torch.cat([part.detach().flatten() for parts in kept for part in parts])
    return round(float((whole * torch.linspace(1, 2, len(whole), dtype=whole.dtype)).sum()), 9)


def trained(name: str, *, lists: bool, resumes: bool) -> list[nn.Parameter]:
    parts = [nn.Parameter(torch.linspace(-1, 1 + number, 12, dtype=torch.float64).view(4, 3)) for number in range(4)]
    optimizer = made(name, parts, lists=lists)
    for update in range(NUM_UPDATES):
        if update == NUM_BEFORE_RESUME and resumes:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = made(name, parts, lists=lists, resumes=True)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()

        optimizer.step(cast("Any", partial(fit, parts, update, sparse=name in SPARSE)))
    return parts


def made(name: str, parts: list[nn.Parameter], *, lists: bool, resumes: bool = False) -> torch.optim.Optimizer:
    kind: Any = getattr(torch.optim, name.partition(" ")[0])
    groups: list[dict[str, Any]] = [{"params": parts[:2]}, {"params": parts[2:]}]
    groups = groups if OPTIONS[name][1] else [{"params": parts}]
    if not resumes:
        for group, options in zip(groups, OPTIONS[name], strict=False):
            group |= options | ({"foreach": lists} if name in LISTED else {})
    made: torch.optim.Optimizer = kind(groups)
    return made


def fit(parts: list[nn.Parameter], update: int, *, sparse: bool) -> torch.Tensor:
    """Computes gradients of a sum of fourth powers. Each update fits other numbers."""
    total = torch.zeros((), dtype=torch.float64)
    for number, part in enumerate(parts):
        if update == 0 and number == 1:
            continue  # its first gradient comes late
        with torch.enable_grad():
            rows = torch.tensor([0, 2, 2 - update % 2])
            taken = nn.functional.embedding(rows, part, sparse=True) if sparse else part
            loss = ((taken - 0.5 * (update + 1) / (number + 1)) ** 4).sum() / 8 + (taken * taken.roll(1, 0)).sum() / 8
        (part.grad,) = torch.autograd.grad(loss, part)
        total = total + loss.detach()
    return total
