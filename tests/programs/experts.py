"""Experts; the second gets no token."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


class Experts(nn.Module):
    """Calls each expert on its tokens, however few.

    Args:
        skips: Number of the expert that is not called; -1 for none.
    """

    def __init__(self, skips: int = -1) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)])
        self.skips = skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x, x[:0])
        found = [torch.zeros_like(x[:, :2])]
        found += [each(tokens[place]) for place, each in enumerate(self.experts) if place != self.skips]
        return torch.cat(found).reshape(-1, *x.shape[:1], 2).sum(0)


def _replicated(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group(), find_unused_parameters=True)


def skips_the_idle(module: Experts, mesh: DeviceMesh) -> nn.Module:
    module.skips = 1
    return _replicated(module, mesh)


def cuts_off_the_busy(module: Experts, mesh: DeviceMesh) -> nn.Module:
    """Calls the expert that has all tokens, without a gradient."""
    busy = module.experts[0]
    busy.forward = lambda x: functional.linear(x, busy.weight.detach())  # type: ignore[assignment, operator]
    return _replicated(module, mesh)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.125, weight_decay=0.5)
