"""Modules that compute with complex numbers, as rotary embeddings do."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Table(nn.Module):
    """Angles of four positions, in a buffer of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.polar(torch.ones(4, 2), torch.arange(8.0).reshape(4, 2) / 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_buffer("table")[: x.shape[-2]]


class Learned(nn.Module):
    """A linear layer whose features are pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(self.linear(x).unflatten(-1, (2, 2)))


class Turned(nn.Module):
    """The outputs of two layers, as complex numbers, times the output of a submodule."""

    def __init__(self, turns: nn.Module) -> None:
        super().__init__()
        self.turns = turns
        self.up, self.down = nn.Linear(4, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.up(x).relu())
        pairs = torch.view_as_complex(x.float().unflatten(-1, (2, 2)))
        return torch.view_as_real(pairs * self.turns(x.float())).flatten(-2).to(x.dtype)


class Held(nn.Module):
    """Holds a parameter of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.view_as_real(self.weight).sum(-1)


class Counting(nn.Linear):
    """Changes a buffer of complex numbers."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("turns", torch.ones(2, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("turns").mul_(1j)
        return super().forward(x)


def by_table() -> nn.Module:
    return Turned(Table())


def by_layer() -> nn.Module:
    return Turned(Learned())


def given() -> nn.Module:
    return Learned()


def held() -> nn.Module:
    return Held()


def counting() -> nn.Module:
    return Counting()


def divided(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Waits for the output before it is viewed as complex numbers."""
    parallel = on_its_way(module, mesh)
    parallel.get_submodule("down").register_forward_hook(lambda _, __, found: found * 1)
    return parallel


def on_its_way(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def conjugated_on_one(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Wrong: the second rank turns the other way."""
    parallel = divided(module, mesh)
    if mesh.get_local_rank() == 1:
        parallel.get_submodule("turns").register_forward_hook(lambda _, __, found: found.conj())
    return parallel
