"""Optimizers of torch.optim in every form that they have, on whole parameters and on DTensors: `studies.optimizers`."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.tensors import DTYPES, Placed

STEPS = 10
SHAPES = ((5, 3), (4, 2), (3, 6))
FORMS: Mapping[str, Mapping[str, bool]] = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}

OPTIONS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "ASGD": ({}, {"weight_decay": 0.1}, {"t0": 2.0}),
    "Adadelta": ({}, {"weight_decay": 0.1}),
    "Adafactor": ({}, {"weight_decay": 0.1}),
    "Adagrad": ({}, {"weight_decay": 0.1, "lr_decay": 0.1}),
    "Adam": ({}, {"weight_decay": 0.1}, {"amsgrad": True}, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "AdamW": ({}, {"amsgrad": True}),
    "Adamax": ({}, {"weight_decay": 0.1}),
    "Muon": ({}, {"nesterov": False}),
    "NAdam": ({}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": ({}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RMSprop": ({}, {"centered": True, "momentum": 0.5}, {"weight_decay": 0.1}),
    "Rprop": ({},),
    "SGD": ({}, {"momentum": 0.5}, {"momentum": 0.5, "nesterov": True, "weight_decay": 0.1}, {"weight_decay": 0.1}),
}  # fmt: skip
"""Of torch.optim but LBFGS, which calls the loss by itself, and SparseAdam, whose gradients are sparse."""


class Setting(NamedTuple):
    """One row of the table."""

    name: str
    form: str
    options: tuple[tuple[str, Any], ...]
    dtype: str

    def make(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        kind: Any = getattr(torch.optim, self.name)
        made: torch.optim.Optimizer = kind(parameters, lr=0.05, **dict(self.options), **FORMS.get(self.form, {}))
        return made


def settings(name: str) -> Iterator[Setting]:
    """Every row of an optimizer; 'own' is the form of one that has no other."""
    taken = inspect.signature(getattr(torch.optim, name)).parameters
    forms = [form for form, flags in FORMS.items() if set(flags) <= set(taken)]
    for dtype in ("float32", "bfloat16", "float16"):
        for form, options in itertools.product(forms or ["own"], OPTIONS[name]):
            for more in ({}, {"maximize": True}) if "maximize" in taken else ({},):
                yield Setting(name, form, tuple({**options, **more}.items()), dtype)


def drawn(dtype: str, num: int) -> list[torch.Tensor]:
    """Values around one, as many of each shape."""
    source = torch.Generator().manual_seed(num)
    return [torch.randn(shape, generator=source, dtype=torch.float64).to(DTYPES[dtype]) for shape in SHAPES]


def trained(setting: Setting, parameters: list[nn.Parameter], gradients: list[list[torch.Tensor]]) -> None:
    """As many updates as there are gradients."""
    optimizer = setting.make(parameters)
    for each in gradients:
        for parameter, gradient in zip(parameters, each, strict=True):
            parameter.grad = gradient
        optimizer.step()


def __getattr__(name: str) -> Any:
    """`tests.programs.optimizers:sharded_Adam` is `sharded_beside_whole` of Adam."""
    if not name.startswith("sharded_"):
        raise AttributeError(name)
    return partial(sharded_beside_whole, name.removeprefix("sharded_"))


def sharded_beside_whole(
    name: str, case: FetchCase, mesh: DeviceMesh, given: Mapping[str, torch.Tensor]
) -> dict[str, Placed]:
    """param.0: how far this rank's part is from that of whole tensors after ten updates, by setting; NaN: it raises."""
    found = []
    for setting in settings(name):
        gradients = [drawn(setting.dtype, 1 + step) for step in range(STEPS)]
        whole = [nn.Parameter(each) for each in drawn(setting.dtype, 0)]
        sharded = [nn.Parameter(divided(each, mesh)) for each in drawn(setting.dtype, 0)]
        try:
            trained(setting, whole, gradients)
            trained(setting, sharded, [[divided(each, mesh) for each in step] for step in gradients])
        except Exception:  # of any optimizer
            found.append(torch.nan)
        else:
            found.append(max(_distance(one, other, mesh) for one, other in zip(whole, sharded, strict=True)))
    return {"param.0": Placed(torch.tensor(found, dtype=torch.float64), case.layouts()["param.0"])}


def divided(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(
        own_part(whole, mesh).clone(), mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def own_part(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's rows, as torch.chunk divides them."""
    rows = -(-len(whole) // mesh.size())
    return whole[rows * mesh.get_local_rank() :][:rows]


def _distance(whole: torch.Tensor, sharded: Any, mesh: DeviceMesh) -> float:
    error = own_part(whole.detach(), mesh).double() - sharded.detach().to_local().double()
    return float(error.abs().max()) if error.numel() else 0.0
