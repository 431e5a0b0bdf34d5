"""Two ways to make a decoder parallel."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module


def heads_and_hidden_divided(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Applies tensor parallelism as in torch's tutorials.

    The tensors within a layer are plain local tensors. The tensors between layers are whole. The last rank alone has
    the right weights of these layers, and sends each rank its shards.
    """
    plan: dict[str, ParallelStyle] = {"head": ColwiseParallel()}  # a name that the decoder does not have
    plan |= {f"layers.*.{name}": ColwiseParallel() for name in ("attention.[qkv]*", "mlp.gate", "mlp.?p")}
    plan |= {f"layers.*.{name}": RowwiseParallel() for name in ("attention.out", "mlp.down")}
    last = mesh.size() - 1
    if mesh.get_local_rank() != last:
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.weight = nn.Parameter(torch.full_like(layer.weight, torch.nan))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Parallelize plan key")
        return parallelize_module(module, mesh, plan, src_data_rank=last)


def layers_sharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Applies FSDP2 to each layer separately, and then to the root module with all other parameters."""
    for layer in module.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh)
    sharded: nn.Module = fully_shard(module, mesh=mesh)  # type: ignore[assignment]  # of both classes
    return sharded
