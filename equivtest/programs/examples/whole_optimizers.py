"""Training of fixed tensors by optimizers whose updates no bound follows, and by other ways of elementwise optimizers.

No bound follows updates that are not elementwise, or not continuous. Other ways are complex tensors, fused kernels
without a rule for DTensors, and updates that autograd can follow.

Each optimizer fits small tensors in float64, so that its result is one number. A rank may train by lists of tensors
(foreach), and resumes: after two updates the state is loaded into a new optimizer. Hooks change the closure and the
saved state, and change them back. The unsharded module's optimizer loops over the tensors, and does not resume.
DTensors are not trained, because Rprop raises on them.

Source: torch/optim/lbfgs.py, rprop.py, _adafactor.py, _muon.py, sparse_adam.py, adagrad.py and sgd.py (2.13.0).
"""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from equivtest.programs.examples.optimizer_options import COMMON, LATER_COMMON, ROUNDED, UNLIKE, new, options_of

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
    "SGD fused": (UNLIKE["SGD"]["plain"] | {"lr": 0.125}, UNLIKE["SGD"]["varied"] | {"lr": 0.0625}),
    "Adagrad fused": (
        {"lr": 0.25, "lr_decay": 0.25, "weight_decay": 0.25},
        {"lr": 0.125, "eps": 0.25, "maximize": True},
    ),
    "AdamW fused": (
        {"lr": torch.tensor(0.25), "betas": (0.5, 0.75), "eps": 0.25, "amsgrad": True},
        {"lr": torch.tensor(0.125), "betas": (0.75, 0.5), "eps": 0.5, "weight_decay": 0.5, "maximize": True},
    ),
    **{
        f"{name} complex": (options_of(name, "plain", COMMON), options_of(name, "varied", LATER_COMMON))
        for name in UNLIKE
    },
}
"""Name -> options of two groups. torch's LBFGS has one group."""
LISTED = ("Rprop", "Adafactor")
"""Optimizers that have an implementation by lists, beside the optimizers of `UNLIKE`."""
SPARSE = ("SparseAdam", "Adagrad", "SGD")
"""Optimizers that get sparse gradients, with a row that occurs twice."""
HALF_COMPLEX = ("Rprop", "LBFGS", *(f"{name} complex" for name in UNLIKE))
"""Optimizers whose second two tensors are complex."""
NUM_UPDATES, NUM_BEFORE_RESUME = 4, 2


@_disable_current_modes()  # no tensor of the module takes part
def trained_number(*, lists: bool, resumes: bool) -> float:
    """Returns the sum of all elements that the optimizers have trained, each with another weight.

    The sum is rounded, because kernels, and updates that autograd can follow, round to float32.
    """
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    with checks():  # torch warns about sparse tensors that are made outside of it
        kept = [trained(name, lists=lists, resumes=resumes) for name in OPTIONS]
    whole = torch.cat([as_real(part).flatten() for parts in kept for part in parts])
    return round(float((whole * torch.linspace(1, 2, len(whole), dtype=whole.dtype)).sum()), 3)


@cache
def unsharded_number() -> float:
    """Returns the number of the loops over the tensors. The process of the oracle computes it once."""
    return trained_number(lists=False, resumes=False)


def trained(name: str, *, lists: bool, resumes: bool) -> list[torch.Tensor]:
    """Trains four tensors. The first gradient of one comes late, on which fused SGD raises (finding 168)."""
    parts = [first_values(number, is_complex=number > 1 and name in HALF_COMPLEX) for number in range(4)]
    late = None if name.endswith(" fused") else 1
    optimizer = made(name, parts, lists=lists, resumes=resumes)
    if resumes:
        optimizer.register_step_post_hook(forget_gradients)
        optimizer.register_step_pre_hook(unwrap_closure)
    for update in range(NUM_UPDATES):
        if update == NUM_BEFORE_RESUME and resumes and name.partition(" ")[0] not in ROUNDED:
            optimizer.register_state_dict_pre_hook(halve_rates)
            optimizer.register_state_dict_post_hook(wrap_state)
            optimizer.register_state_dict_post_hook(double_rates, prepend=True)
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = made(name, parts, lists=lists, is_new=True)
            optimizer.register_step_pre_hook(unwrap_closure)
            optimizer.register_load_state_dict_pre_hook(double_rates)
            optimizer.register_load_state_dict_pre_hook(unwrap_state, prepend=True)
            optimizer.register_load_state_dict_post_hook(halve_rates)
            optimizer.load_state_dict(state)
        else:
            optimizer.zero_grad()
        closure = partial(fit, parts, update, name=name, skipped=late if update == 0 else None)
        optimizer.step(cast("Any", (closure,) if resumes else closure))
    return parts


def first_values(number: int, *, is_complex: bool) -> torch.Tensor:
    if is_complex:
        return torch.view_as_complex(torch.linspace(-1, 1 + number, 24, dtype=torch.float64).view(4, 3, 2))
    return torch.linspace(-1, 1 + number, 12, dtype=torch.float64).view(4, 3)


def made(
    name: str, parts: list[torch.Tensor], *, lists: bool, resumes: bool = False, is_new: bool = False
) -> torch.optim.Optimizer:
    """Makes an optimizer. If `is_new`, its options are torch's.

    Tensors that need no gradient can be updated in the way that autograd follows (differentiable).
    """
    kind, _, way = name.partition(" ")
    groups: list[dict[str, Any]] = [{"params": parts[:2]}, {"params": parts[2:]}]
    groups = groups if OPTIONS[name][1] else [{"params": parts}]
    ways: dict[str, bool] = {"foreach": lists} if name in LISTED or way else {}
    if way == "fused" and lists:
        ways = {"fused": True}
    elif way == "complex" and resumes and not lists:
        ways = {"differentiable": True}
    if not is_new:
        for group, options in zip(groups, OPTIONS[name], strict=False):
            group |= options | ways
    return new(getattr(torch.optim, kind), groups)


def forget_gradients(optimizer: torch.optim.Optimizer, *called: Any) -> None:
    optimizer.zero_grad()


def unwrap_closure(optimizer: torch.optim.Optimizer, given: Any, how: Any) -> Any:
    """Returns the arguments of `step`, with the closure in place of a tuple that has it."""
    called, (closure,) = given
    return (called, closure), how


def wrap_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return {"saved": state}


def unwrap_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    saved: dict[str, Any] = state["saved"]
    return saved


def double_rates(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    for group in state["param_groups"]:
        group["lr"] = group["lr"] * 2


def halve_rates(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] / 2


def as_real(part: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(part) if part.is_complex() else part


@torch.enable_grad()
def fit(parts: list[torch.Tensor], update: int, *, name: str, skipped: int | None) -> torch.Tensor:
    """Computes gradients of a sum of powers. Each update fits other numbers."""
    total = torch.zeros((), dtype=torch.float64)
    power = 2 if name.endswith((" complex", " fused")) else 4
    leaves = {number: part.detach().requires_grad_() for number, part in enumerate(parts) if number != skipped}
    for number, leaf in leaves.items():
        rows = torch.tensor([0, 2, 2 - update % 2])
        taken = nn.functional.embedding(rows, leaf, sparse=True) if name in SPARSE else as_real(leaf)
        loss = ((taken - 0.5 * (update + 1) / (number + 1)) ** power).sum() / 8 + (taken * taken.roll(1, 0)).sum() / 8
        total = total + loss
    for number, gradient in zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True):
        parts[number].grad = gradient
    return total.detach()
