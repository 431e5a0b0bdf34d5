"""Gradients under ZeRO-3: each rank keeps its partition of the average over ranks.

Source: deepspeed/runtime/zero/stage3.py (0.19.8): a gradient is reduced as soon as it is complete and
added to the partition of the micro-batches before.
"""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Renamed in torch 2.13, which warns of the old name."""


class Gradients:
    """Partitions of gradients by parameter name: (padded numel / w,), local."""

    def __init__(self, mesh: DeviceMesh, *, padding: float) -> None:
        self.mesh, self.padding = mesh, padding
        self.partitions: dict[str, torch.Tensor] = {}

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Adds this rank's whole gradient of one micro-batch, averaged with those of the other ranks."""
        own = self.average(gradient)
        before = self.partitions.get(name)
        self.partitions[name] = own if before is None else before + own

    def average(self, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's partition of the average over ranks of their whole gradients; no collective for no element."""
        size = -(-gradient.numel() // self.mesh.size())
        padded = gradient.new_full((size * self.mesh.size(),), self.padding)
        padded[: gradient.numel()] = gradient.reshape(-1)
        own = gradient.new_empty((size,))
        if size:
            reduce_scatter(own, padded, group=self.mesh.get_group())
        return own.div_(self.mesh.size())

    def clear(self) -> None:
        """Forgets all gradients: the next ones are of another step."""
        self.partitions.clear()
