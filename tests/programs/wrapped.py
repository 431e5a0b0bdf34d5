"""A module with running statistics, under wrappers that rename its parts."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class Normed(nn.Module):
    """Holds batch norm within a part, and a part that is called as wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.module = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.module(self.inner(x))
        return output


class Around(nn.Module):
    """A user's wrapper, which has another name for the wrapped module."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.held(x)
        return output


def _replicated(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group(), broadcast_buffers=False)


def whole(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return _replicated(module, mesh)


def parts(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for name, part in list(module.named_children()):
        setattr(module, name, _replicated(part, mesh))
    return module


def around(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return Around(_replicated(module, mesh))


def around_parts(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return Around(parts(module, mesh))


def wrong_in_around_parts(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """One rank's part gives an eighth more."""
    if mesh.get_local_rank():
        module.inner[0].register_forward_hook(lambda _, __, given: given * 1.125)  # type: ignore[index, union-attr, operator]
    return around_parts(module, mesh)


def flattened(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 over both axes of the mesh."""
    fully_shard(module, mesh=mesh["dp", "sp"]._flatten("all"))
    return Around(module)
