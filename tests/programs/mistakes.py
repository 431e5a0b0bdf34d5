"""Functions that raise as a newcomer's do."""

from __future__ import annotations

import json
import sys
import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def without_package() -> nn.Module:
    import nosuchpackage  # noqa: F401  # type: ignore[import-not-found]

    return nn.Linear(3, 2)


def without_device() -> nn.Module:
    raise AssertionError("Torch not compiled with CUDA enabled")  # the text of torch


def without_reason() -> nn.Module:
    return nn.Linear(3, {}["out"])


def without_configuration() -> nn.Module:
    sys.exit("no configuration")


class Exiting(nn.Module):
    """Calls sys.exit in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sys.exit(3)


def with_broken_json() -> None:
    json.loads("{")


class Heads(nn.Module):
    """Three heads of two features."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.view(*x.shape[:-1], 3, 2)
        return y.flatten(-2)


def as_it_is(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return module


def with_odd_heads() -> None:
    Heads()(torch.ones(2, 3))


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    return parallelize_module(module, mesh, plan)


def plan_of_nothing(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # torch warns of it
        return parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def without_return(module: nn.Module, mesh: DeviceMesh) -> None:
    tensor_parallel(module, mesh)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x.add_(1))
        return output


class Detached(InPlace):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x)
        return output.detach()


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.25)


def rowwise(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, {"layer": RowwiseParallel(input_layouts=Replicate())})


class OddHeads(nn.Module):
    """Three heads of two features between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.up(x).view(*x.shape[:-1], -1, 2)
        output: torch.Tensor = self.down(heads.flatten(-2))
        return output


def divided_heads(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
