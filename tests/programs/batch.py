"""Modules with different rows on every rank, and ways to reduce their gradients, right and wrong."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from equivtest.errors import Unsupported
from tests.programs.module import curved, ddp, fsdp2, mlp, spare

__all__ = ["curved", "ddp", "fsdp2", "mlp", "spare"]


class Ranked(nn.Module):
    """A softmax over the rows: each row's output depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ranked: torch.Tensor = self.linear(x).softmax(0)
        return ranked


def ranked() -> nn.Module:
    return Ranked()


class Product(nn.Module):
    """A product over all rows, one number as a loss is; x may also have one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scale * x).sum()


def one_number() -> nn.Module:
    return Product()


class Doubled(nn.Module):
    """Two rows for each one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x])


def doubled() -> nn.Module:
    return Doubled()


def ddp_of_layers(module: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """DDP with one bucket for each gradient, which accepts unused parameters."""
    return DistributedDataParallel(
        module, process_group=mesh.get_group(), bucket_cap_mb=1e-6, find_unused_parameters=True
    )  # type: ignore[arg-type]


def fsdp2_of_layers(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in module.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def replicated(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """DistributedDataParallel by a hook, without a module that shows it."""
    return replicate(module, process_group=mesh.get_group())


def ddp_without_synchronization(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallel = ddp(module, mesh)
    parallel.require_backward_grad_sync = False
    return parallel


def own_gradients(state, bucket):  # type: ignore[no-untyped-def]  # of annotations DDP takes no strings
    """A hook that forgets the all_reduce."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def ddp_with_a_hook_that_reduces_nothing(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallel = ddp(module, mesh)
    parallel.register_comm_hook(None, own_gradients)  # type: ignore[operator]
    return parallel


def ddp_compressed_to_float16(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallel = ddp(module, mesh)
    parallel.register_comm_hook(mesh.get_group(), fp16_compress_hook)  # type: ignore[operator]
    return parallel


def ddp_that_ignores_a_parameter(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["2.weight"])  # type: ignore[no-untyped-call]
    return ddp(module, mesh)


class OwnShare:
    """Replaces the reduce-scatter: each rank keeps its shard of its own operand, as if all operands were equal."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, **how: Any
    ) -> None:
        operands = group.size() if op == dist.ReduceOp.SUM else 1
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()] * operands)


def fsdp2_that_reduces_nothing(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallel = fully_shard(module, mesh=mesh)
    parallel.set_custom_reduce_scatter(OwnShare())
    return parallel


def ddp_that_sums(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallel = ddp(module, mesh)
    parallel.register_comm_hook(mesh.get_group(), summed)  # type: ignore[operator]
    return parallel


def summed(group, bucket):  # type: ignore[no-untyped-def]
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def fsdp2_that_sums(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallel = fully_shard(module, mesh=mesh)
    parallel.set_gradient_divide_factor(1.0)
    parallel.set_force_sum_reduction_for_comms(True)
    return parallel


class Widened(nn.Sequential):
    """Gives float32 in every dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide: torch.Tensor = super().forward(x).float()
        return wide


def widened() -> nn.Module:
    return Widened(nn.Linear(3, 2))


def fsdp2_that_gives_float32(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float32))


def sharded_on_one_rank_alone(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(module, mesh=mesh) if mesh.get_local_rank() == 0 else module


class Distributed(nn.Sequential):
    """Returns its rows as a part of all ranks' rows."""

    mesh: DeviceMesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(super().forward(x), self.mesh, [Shard(0)], run_check=False)


def dtensor_of_rows(module: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    distributed = Distributed(*module)
    distributed.mesh = mesh
    return distributed


def fsdp2_over_tensor_parallelism(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallelism along one axis, with the same rows on its ranks, and FSDP2 along the other."""
    two = init_device_mesh("cpu", (mesh.size() // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return fully_shard(parallelize_module(module, two["tp"], plan), mesh=two["dp"])


def lacking(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Raises as on a release of torch that has no such wrapper."""
    raise Unsupported("no such wrapper")


def raises_on_the_last_rank(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if mesh.get_rank() == mesh.size() - 1:
        raise RuntimeError("no room for the shards\nand more of it")
    return ddp(module, mesh)


def hangs(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    time.sleep(600)
    return module


def ends_the_last_rank(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if mesh.get_rank() == mesh.size() - 1:
        os.write(2, b"no library to load\n")
        os._exit(3)
    return ddp(module, mesh)
