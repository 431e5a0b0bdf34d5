"""Modules whose buffers follow the rows of a batch, reduced over the ranks or not."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn import functional as collectives
from torch.nn.parallel import DistributedDataParallel

NUM_KINDS, FEATURES = 2, 4


class Stateful(nn.Module):
    """A module that reduces its state over the ranks of `group`, if it has one."""

    group: dist.ProcessGroup | None = None

    def summed(self, own: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return own
        total: torch.Tensor = collectives.all_reduce(own, group=self.group)  # type: ignore[no-untyped-call]
        return total


class Counting(Stateful):
    """A layer that counts the rows of each kind, as a router counts the tokens of each expert."""

    counts: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, FEATURES)
        self.register_buffer("counts", torch.zeros(NUM_KINDS, dtype=torch.int64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, kind: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        self.counts += self.summed((kind[:, None] == torch.arange(NUM_KINDS)).sum(0))
        self.calls += 1
        output: torch.Tensor = self.layer(x)
        return output


class First(nn.Module):
    """Keeps the first row of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("first", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("first").copy_(x.detach()[0])
        output: torch.Tensor = self.layer(x)
        return output


def first() -> nn.Module:
    return First()


def counting() -> nn.Module:
    return Counting()


class CountingLoss(Counting):
    """Gives its mean too."""

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits = super().forward(x, kind)
        return {"loss": logits.square().mean(), "logits": logits}


def counting_loss() -> nn.Module:
    return CountingLoss()


class Called(Counting):
    """Counts its calls and no rows."""

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        return super().forward(x, kind[:0])


def called() -> nn.Module:
    return Called()


class Normed(Stateful):
    """A batch norm that remembers the means of its features."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, FEATURES)
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        num_rows = self.summed(torch.tensor(float(len(x))))
        mean = self.summed(x.sum(0)) / num_rows
        variance = self.summed((x - mean).square().sum(0)) / num_rows
        self.mean = 0.5 * self.mean + 0.5 * mean.detach()
        return (x - mean) * torch.rsqrt(variance + 1.0)


def normed() -> nn.Module:
    return Normed()


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, FEATURES), nn.BatchNorm1d(FEATURES))


class OtherNorm(nn.BatchNorm1d):
    """A subclass, as libraries define."""


def other_norm(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    module.get_submodule("1").__class__ = OtherNorm
    return own_rows(module, mesh)


def own_rows(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The state of each rank's own rows."""
    return DistributedDataParallel(module, process_group=mesh.get_group(), broadcast_buffers=False)


def whole_batch(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The state of the rows of all ranks."""
    assert isinstance(module, Stateful)
    module.group = mesh.get_group()
    return own_rows(module, mesh)


def summing(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The same, with gradients that are added up."""
    parallel = whole_batch(module, mesh)
    for parameter in parallel.parameters():
        parameter.register_hook(lambda gradient: mesh.size() * gradient)
    return parallel
