"""A module with a method on each rank's rows, a rule for a new operator, and plain tensors beside DTensors.

Source: local_map, register_sharding and implicit_replication in torch/distributed/tensor/experimental, and
distribute_module in torch/distributed/tensor/_api.py (2.13.0).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.experimental import implicit_replication, local_map, register_sharding
from torch.nn import functional


class Weighted(nn.Module):
    """The pair (f flip(r) + b + p, s) with rows r = w relu(x), their sum s, and the number p of each row.

    f is a buffer, and b is frozen.
    """

    factor: torch.Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features), requires_grad=False)
        self.register_buffer("factor", torch.tensor(-1.0))

    def forward(self, x: torch.Tensor) -> Any:
        rows, total = self.weigh(x, self.weight, dim=0)
        turned = self.turn(self.turn(rows, 1), 0)
        return self.number(turned * self.factor + self.bias), total

    def weigh(self, x: torch.Tensor, weight: torch.Tensor, *, dim: int) -> Any:
        rows = functional.relu(x) * weight
        return rows, rows.sum(dim)

    def turn(self, rows: torch.Tensor, dim: int) -> Any:
        return rows.flip(dim)

    def number(self, rows: torch.Tensor) -> Any:
        return rows + torch.arange(len(rows), dtype=rows.dtype, device=rows.device).unsqueeze(1)


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

    def weigh(self, x: torch.Tensor, weight: torch.Tensor, *, dim: int) -> Any:
        rows, whole, share = [Shard(0)], [Replicate()], [Partial()]
        own = local_map(
            super().weigh,
            out_placements=(rows, share),
            in_placements=(rows, whole),
            in_grad_placements=(rows, share),
            redistribute_inputs=True,
        )
        return own(x, weight, dim=dim)

    def turn(self, rows: torch.Tensor, dim: int) -> Any:
        return turned(rows, dim)

    def number(self, rows: torch.Tensor) -> Any:
        with implicit_replication():
            return super().number(rows)


def by_rows(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divides the rows of x. The number of ranks must divide the number of rows, as local_map assumes.

    All ranks except the first have wrong parameters and buffers at first. distribute_module broadcasts the right ones.
    They have a wrong x too, and from_local with `run_check` broadcasts the right one.
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

    return distribute_module(module, mesh, input_fn=prepare, output_fn=gather)
