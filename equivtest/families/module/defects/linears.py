"""Parallelized modules that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from equivtest.families.module.case import ModuleCase
from equivtest.families.module.subject import (
    GatedBlock,
    data_parallel,
    fully_sharded,
    run_module,
    sequence_parallel,
    tensor_parallel,
)
from equivtest.families.redistribute.defects import scale_gradient
from equivtest.kit.subject import Answers, Given


def residual_on_every_rank(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The block's input is added to each rank's share of the output, before these are summed."""
    return run_module(case, mesh, given, _add_before_the_sum)


def _add_before_the_sum(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    block.__class__ = _Residual
    return _summed_later(block, mesh)


def _summed_later(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallel, but that each rank's share of the change is left to the block to sum."""
    divided = ColwiseParallel(use_local_output=False)
    share = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
    return parallelize_module(block, mesh, {"gate": divided, "up": divided, "down": share})


class _Residual(GatedBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share: DTensor = self.change(x)
        total = DTensor.from_local(x, share.device_mesh, [Partial()], run_check=False) + share
        assert isinstance(total, DTensor)
        return total.redistribute(placements=[Replicate()]).to_local()


def gradient_averaged(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The gradient that comes back through the block is averaged over the ranks, as data parallelism would."""
    return run_module(case, mesh, given, _average)


def _average(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return _Averaged(tensor_parallel(block, mesh), mesh)


class _Averaged(nn.Module):
    """A block of which x takes the average of what comes back."""

    def __init__(self, block: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.block, self.factor = block, 1 / mesh.size()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.block(scale_gradient(x, self.factor))
        return output

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.block.named_parameters(*args, **kwargs)


def shares_of_tokens_not_summed(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Of its share of the output each rank keeps its own tokens, and never adds the other ranks' shares of these."""
    return run_module(case, mesh, given, _cut_the_shares)


def _cut_the_shares(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    block.__class__ = _Cut
    return _summed_later(block, mesh)


class _Cut(GatedBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share: DTensor = self.change(x)
        taken_for_whole = DTensor.from_local(share.to_local(), share.device_mesh, [Replicate()], run_check=False)
        change: torch.Tensor = taken_for_whole.redistribute(placements=[Shard(0)]).full_tensor()
        return x + change


def gradient_of_own_tokens_alone(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Each rank cuts its tokens from x itself, so that the gradients of the others' never come back to it."""
    return run_module(case, mesh, given, _cut_the_tokens)


def _cut_the_tokens(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    def cut(module: nn.Module, handed: tuple[torch.Tensor]) -> torch.Tensor:
        (x,) = handed
        each = -(-len(x) // mesh.size())
        own = x[each * mesh.get_local_rank() :][:each]
        return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride())

    sequence_parallel(block, mesh).register_forward_pre_hook(cut, prepend=True)
    return block


def gradients_of_own_rows(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Data parallelism that never reduces: as when accumulation of gradients is not ended before the update."""
    return run_module(case, mesh, given, _unsynchronized)


def _unsynchronized(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallel = data_parallel(block, mesh)
    parallel.require_backward_grad_sync = False  # type: ignore[assignment]
    return parallel


def one_parameter_left_out(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """One parameter is not told to data parallelism, whose gradient every rank keeps for itself."""
    return run_module(case, mesh, given, _leave_out)


def _leave_out(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(block, ["up.weight"])  # type: ignore[no-untyped-call]
    return data_parallel(block, mesh)


def shards_of_own_gradients(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """In place of a reduce-scatter each rank keeps, of its own gradient, the part that is its shard."""
    return run_module(case, mesh, given, _keep_own_part)


def _keep_own_part(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallel = fully_sharded(block, mesh)
    assert isinstance(parallel, FSDPModule)
    parallel.set_custom_reduce_scatter(_OwnPart())  # type: ignore[arg-type]  # it asks for two functions
    return parallel


class _OwnPart:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: ProcessGroup, *how: Any, **named: Any
    ) -> None:
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def gradients_added_up(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Gradients are added up over the ranks and not divided, so that a step grows with the number of ranks."""
    return run_module(case, mesh, given, _sum)


def _sum(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallel = fully_sharded(block, mesh)
    assert isinstance(parallel, FSDPModule)
    parallel.set_gradient_divide_factor(1.0)
    parallel.set_force_sum_reduction_for_comms(True)
    return parallel
