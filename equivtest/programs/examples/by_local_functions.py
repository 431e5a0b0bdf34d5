"""A module with a method on each rank's rows, a rule for a new operator, and plain tensors beside DTensors.

Source: local_map, register_sharding and implicit_replication in torch/distributed/tensor/experimental, and
distribute_module, distribute_tensor, zeros, ones and full in torch/distributed/tensor/_api.py (2.13.0).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    full,
    ones,
    zeros,
)
from torch.distributed.tensor.experimental import implicit_replication, local_map, register_sharding
from torch.nn import functional


class Weighted(nn.Module):
    """The pair (f flip(r) + b + p + c, s) with rows r = w relu(x), and the number p of each row.

    s is the negative sum of the rows, c the constant of each feature. f is a buffer, and b is frozen.
    """

    factor: torch.Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features), requires_grad=False)
        self.register_buffer("factor", torch.tensor(-1.0))

    def forward(self, x: torch.Tensor) -> Any:
        rows, half, total = self.weigh(0, [x, self.weight], -torch.ones_like(self.weight), relu=True)
        turned = self.turn(self.turn(rows, 1), 0)
        return self.number(turned * self.factor + self.bias) + self.constant(x), self.twice(total) * half

    def weigh(self, dim: int, operands: list[torch.Tensor], signs: torch.Tensor, *, relu: bool) -> Any:
        x, weight = operands
        rows = (functional.relu(x) if relu else x) * weight
        return rows, 0.5, (rows * signs).sum(dim)

    def turn(self, rows: torch.Tensor, dim: int) -> Any:
        return rows.flip(dim)

    def twice(self, total: torch.Tensor) -> Any:
        return 2 * total

    def number(self, rows: torch.Tensor) -> Any:
        return rows + torch.arange(len(rows), dtype=rows.dtype, device=rows.device).unsqueeze(1)

    def constant(self, x: torch.Tensor) -> Any:
        return torch.arange(x.shape[1], dtype=x.dtype, device=x.device) + 3


def weighted() -> nn.Module:
    return Weighted(2)


@torch.library.custom_op("equivtest_examples::turned", mutates_args=())
def turned(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the rows in the opposite order along a dim."""
    return torch.flip(rows, (dim,))


@turned.register_fake
def _(rows: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.empty_like(rows)


turned.register_autograd(
    lambda ctx, gradient: (turned(gradient, ctx.dim), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "dim", inputs[1]),
)


def kept_by_turning(rows: Any, dim: int) -> list[tuple[list[Any], list[Any]]]:
    """Returns the placements of the result and of the arguments that `turned` allows."""
    others = [Shard(other) for other in range(rows.ndim) if other != dim]
    return [([placement], [placement, None]) for placement in (Replicate(), *others)]


class WeightedByRows(Weighted):
    """A `Weighted` of DTensors, which computes the rows and their sum on local tensors."""

    def weigh(self, dim: int, operands: list[torch.Tensor], signs: Any, *, relu: bool) -> Any:
        rows, whole, share = [Shard(0)], [Replicate()], [Partial()]
        own = local_map(
            super().weigh,
            out_placements=(rows, None, share),
            in_placements=(None, rows, whole, None),
            in_grad_placements=(None, rows, share, None),
            redistribute_inputs=True,
        )
        return own(dim, operands, signs.to_local(), relu=relu)

    def turn(self, rows: torch.Tensor, dim: int) -> Any:
        return turned(rows, dim)

    def twice(self, total: torch.Tensor) -> Any:
        as_share: Any = local_map(out_placements=[Partial()], in_placements=([Partial()],))
        return as_share(super().twice)(total)

    def number(self, rows: torch.Tensor) -> Any:
        with implicit_replication():
            return super().number(rows)

    def constant(self, x: Any) -> Any:
        """Adds up tensors that torch makes under different placements, or replicates on the current mesh."""
        mesh, size, kind = x.device_mesh, tuple(x.shape), {"dtype": x.dtype}
        doubled = 2 * torch.arange(size[1], device=x.device, **kind)
        with mesh:
            whole = zeros(*size, **kind) + DTensor.from_local(doubled)
            share = distribute_tensor(mesh.size() * doubled, placements=[Partial()])
        columns = ones(list(size), **kind, device_mesh=mesh, placements=[Shard(1)])
        rows = full(size, 2.0, **kind, device_mesh=mesh, placements=[Shard(0)])
        return (whole + share.redistribute(placements=[Replicate()]) / mesh.size()) / 4 + columns + rows


def by_rows(module: nn.Module, mesh: DeviceMesh, *, partitions: bool = False) -> nn.Module:
    """Divides the rows of x. The number of ranks must divide the number of rows, as local_map assumes.

    All ranks except the first have wrong parameters and buffers at first. distribute_module broadcasts the right ones.
    They have a wrong x too, and from_local with `run_check` broadcasts the right one.

    Args:
        partitions: Whether a function distributes the weight before torch replicates what is left.
    """
    if mesh.get_local_rank():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data.fill_(torch.nan)
    register_sharding(torch.ops.equivtest_examples.turned.default)(kept_by_turning)
    module.__class__ = WeightedByRows
    whole = [Replicate()]

    def prepare(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        wrong = math.nan if mesh.get_local_rank() else 0.0
        return tuple(DTensor.from_local(each + wrong, mesh, whole, run_check=True) for each in inputs)

    def gather(module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(each.redistribute(mesh, whole).to_local() for each in outputs)

    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        module.register_parameter("weight", nn.Parameter(distribute_tensor(module.get_parameter("weight"), mesh)))

    return distribute_module(module, mesh, partition if partitions else None, prepare, gather)
