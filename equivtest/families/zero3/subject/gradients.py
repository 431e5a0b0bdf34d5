"""Holds gradients under ZeRO-3. Each rank has its partition of the gradients' average over the ranks.

Source: deepspeed/runtime/zero/stage3.py (0.19.8): a gradient is reduced as soon as it is complete and
added to the partition of the micro-batches before.
"""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The reduce_scatter of one tensor, by its name in torch 2.13 or by the old one, which torch 2.13 warns about."""


class Gradients:
    """This rank's partitions of gradients, by parameter name. Each is a tensor of one dim, padding included."""

    def __init__(self, mesh: DeviceMesh, *, padding: float) -> None:
        self.mesh, self.padding = mesh, padding
        self.partitions: dict[str, torch.Tensor] = {}

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Averages one micro-batch's gradient over the ranks, and adds this rank's partition of the average."""
        own = self.average(gradient)
        before = self.partitions.get(name)
        self.partitions[name] = own if before is None else before + own

    def average(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns this rank's partition of the ranks' average. A gradient without elements takes no collective."""
        size = -(-gradient.numel() // self.mesh.size())
        padded = gradient.new_full((size * self.mesh.size(),), self.padding)
        padded[: gradient.numel()] = gradient.reshape(-1)
        own = gradient.new_empty((size,))
        if size:
            reduce_scatter(own, padded, group=self.mesh.get_group())
        return own.div_(self.mesh.size())

    def clear(self) -> None:
        self.partitions.clear()
