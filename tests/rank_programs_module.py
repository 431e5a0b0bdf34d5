"""Modules of somebody's own, and ways to parallelize them, right and wrong: tests name them."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


class Tied(nn.Module):
    """One weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        second: torch.Tensor = self.second(self.first(x))
        return second


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def tied() -> nn.Module:
    return Tied()


def norm() -> nn.Module:
    return nn.LayerNorm(3)


def curved() -> nn.Module:
    """As `mlp`, but that it rounds."""
    return nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.linear(x) + torch.full((x.shape[0], 3), -torch.inf).triu(1)
        return scores.softmax(-1)


def noisy() -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_buffer("noise", torch.randn(3))
    return module


def masked() -> nn.Module:
    return Masked()


def dropout() -> nn.Module:
    return nn.Dropout()


def deep() -> nn.Module:
    """So deep that the roundings of a correct program may come to anything."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) for _ in range(24)))


def named_x() -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_parameter("x", nn.Parameter(torch.ones(3)))
    return module


def pair() -> nn.Module:
    return nn.LSTM(3, 3)


def no_module() -> int:
    return 3


def needs_sizes(num_features: int) -> nn.Module:
    return nn.Linear(num_features, num_features)


def tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()})


def sharded_output(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {
        "0": ColwiseParallel(use_local_output=False),
        "2": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    }
    return parallelize_module(module, mesh, plan)


def fsdp2(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(module, mesh=mesh)


def ddp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group())


def whole(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return module


def misspelt(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, {"zero": ColwiseParallel()})


def without_mesh(module: nn.Module) -> nn.Module:
    return module


def with_hooks(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Data parallelism by hand: nothing but hooks of parameters."""
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: all_reduce(gradient, "avg", mesh))
    return module


def renamed(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return nn.Sequential(module)


def without_relu(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    assert isinstance(module, nn.Sequential)
    module[1] = nn.Identity()
    return tensor_parallel(module, mesh)


def with_another_gelu(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Only nearly the same function: GELU by tanh is off by a few ten-thousandths."""
    assert isinstance(module, nn.Sequential)
    module[1] = nn.GELU("tanh")
    return tensor_parallel(module, mesh)


def nothing(module: nn.Module, mesh: DeviceMesh) -> None:
    """Parallelizes in place and forgets to return."""


class Talkative(nn.Sequential):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:  # type: ignore[override]
        return super().forward(x), "aside"


def with_aside(module: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return Talkative(*module)
