"""Programs on meshes of two named axes: rows of the batch along one, layers along the other; right and wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.programs.held import ColumnLinear, RowLinear, Summed, megatron


def tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Along "tp" alone."""
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    return parallelize_module(module, mesh["tp"], plan)


def fsdp2_tp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(tensor_parallel(module, mesh), mesh=mesh["dp"])


def fsdp2_along_tp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The other way round: layers whole, rows of the batch along the second axis."""
    return fully_shard(module, mesh=mesh["tp"])


def ddp_megatron(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Layers by hand; gradients are averaged over the ranks that hold the same part of the layers."""
    return DistributedDataParallel(megatron(module, mesh["tp"]), process_group=mesh["dp"].get_group())


def by_hand(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return averaged(megatron(module, mesh["tp"]), [mesh["dp"]])


def averaged(module: nn.Module, meshes: list[DeviceMesh]) -> nn.Module:
    """Gradients averaged along each of the meshes of one axis."""

    def average(gradient: torch.Tensor) -> torch.Tensor:
        for mesh in meshes:
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=mesh.get_group())
            gradient /= mesh.size()
        return gradient

    for parameter in module.parameters():
        parameter.register_hook(average)
    return module


def whole_on_dp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Gives its output as a DTensor that is whole along "tp"."""
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel(use_local_output=False)}
    return parallelize_module(module, mesh["tp"], plan)


class Block(nn.Module):
    """Normalizes x, applies two layers, and adds the result to x."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.up, self.down = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return output


def deep() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(4)))


def deep_fsdp2_tp(module: Any, mesh: DeviceMesh) -> nn.Module:
    """Each block divided along "tp", and sharded along "dp"."""
    for number, block in enumerate(module):
        plan = {"up": ColwiseParallel(use_local_output=number % 2 == 0), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(module, mesh=mesh["dp"])


def deep_megatron(module: Any, mesh: DeviceMesh) -> nn.Module:
    for block in module:
        block.up, block.down = ColumnLinear(block.up, mesh["tp"]), RowLinear(block.down, mesh["tp"])
    return DistributedDataParallel(module, process_group=mesh["dp"].get_group())


# Wrong ones.


class Shifted(nn.LayerNorm):
    """One norm of one part of the batch is off by an eighth."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.125


def deep_with_a_wrong_norm(module: Any, mesh: DeviceMesh) -> nn.Module:
    if mesh["dp"].get_local_rank() == 1:
        wrong = Shifted(3)
        wrong.weight, wrong.bias = module[2].norm.weight, module[2].norm.bias
        module[2].norm = wrong
    return deep_megatron(module, mesh)


def deep_with_a_bias_of_every_rank(module: Any, mesh: DeviceMesh) -> nn.Module:
    """Adds the bias on every rank, before the sum over the ranks."""
    made = deep_megatron(module, mesh)
    down: Any = module[1].down
    down.forward = lambda x: Summed.apply(nn.functional.linear(x, down.weight, down.bias), down.mesh.get_group())  # type: ignore[no-untyped-call]
    return made


def along_the_other_axis(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return averaged(megatron(module, mesh["tp"]), [mesh["tp"]])


def along_both(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Averages over tp too, which mixes the gradients of different hidden features."""
    return averaged(megatron(module, mesh["tp"]), [mesh["dp"], mesh["tp"]])


def not_at_all(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return megatron(module, mesh["tp"])


def of_the_whole_world(module: Any, mesh: DeviceMesh) -> nn.Module:
    """Layers divided among all ranks, which do not have the same rows."""
    return averaged(megatron(module, mesh._flatten()), [mesh["dp"]])
