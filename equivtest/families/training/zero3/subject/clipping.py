"""Clips gradients by the norm of all gradients under ZeRO-3, when each rank has partitions of the gradients.

The powers of the partitions' norms are added over the ranks, or the largest magnitude is taken. The sum and the maximum
are computed in float64, in which the square of a number with fewer bits neither overflows nor underflows.

Source: deepspeed/runtime/zero/stage3.py (0.19.8), get_grad_norm_direct.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def global_norm(gradients: Sequence[torch.Tensor], norm_type: float, mesh: DeviceMesh) -> torch.Tensor:
    """Returns the norm over all ranks' partitions without padding. A partition may have no elements."""
    elements = torch.cat([gradient.detach().reshape(-1) for gradient in gradients]).double().abs()
    if math.isinf(norm_type):
        total = torch.cat([elements, elements.new_zeros(1)]).max()  # a rank may have nothing
        dist.all_reduce(total, dist.ReduceOp.MAX, group=mesh.get_group())
    else:
        total = elements.pow(norm_type).sum()
        dist.all_reduce(total, group=mesh.get_group())
        total = total.pow(1 / norm_type)
    return total.to(gradients[0].dtype)


def scale(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Multiplies the gradients in place, so that their norm is at most about `max_norm`. Never enlarges a gradient."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)
