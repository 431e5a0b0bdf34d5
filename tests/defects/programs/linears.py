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

from equivtest.programs.case import ModuleCase
from equivtest.programs.examples.gated import GatedBlock
from equivtest.programs.examples.plans import data_parallel, fully_sharded, sequence_parallel, tensor_parallel
from equivtest.programs.run.module import run_module
from tests.defects.defect import Replacing, argument_of
from tests.defects.redistribute import scale_gradient

wrong = Replacing("module")

_SUBJECT = "equivtest.programs.examples.plans:"
_SMALLEST = ModuleCase(
    world_size=2,
    build="equivtest.programs.examples.gated:gated_block",
    parallelize=_SUBJECT + "tensor_parallel",
    x_shape=(1, 2),
)
_FULLY_SHARDED = _SMALLEST.but(parallelize=_SUBJECT + "fully_sharded", x_shape=(2, 2), batch="mean of parts")
_DATA_PARALLEL = _FULLY_SHARDED.but(
    build="equivtest.programs.examples.gated:buffered_block", parallelize=_SUBJECT + "data_parallel"
)
_ROWS = "one rank has all rows, and each of two must have one"
_WHY = "one rank has the whole sum; the sizes of the module are its own"


@wrong("a term added on every rank", _SMALLEST, _WHY)
@argument_of(run_module)
def residual_on_every_rank(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The block's input is added to each rank's share of the output, before these are summed."""
    block.__class__ = _Residual
    return _summed_later(block, mesh)


def _summed_later(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallel, except that the block must sum the ranks' shares of the change."""
    divided = ColwiseParallel(use_local_output=False)
    share = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
    return parallelize_module(block, mesh, {"gate": divided, "up": divided, "down": share})


class _Residual(GatedBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share: DTensor = self.change(x)
        total = DTensor.from_local(x, share.device_mesh, [Partial()], run_check=False) + share
        assert isinstance(total, DTensor)
        return total.redistribute(placements=[Replicate()]).to_local()


@wrong("wrong divisor or wrong group", _SMALLEST, _WHY, claim="gradients_equal_unsharded")
@argument_of(run_module)
def gradient_averaged(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The gradient that comes back through the block is averaged over the ranks, as data parallelism would."""
    return _Averaged(tensor_parallel(block, mesh), mesh)


class _Averaged(nn.Module):
    """A block that gives x the average of the ranks' gradients."""

    def __init__(self, block: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.block, self.factor = block, 1 / mesh.size()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.block(scale_gradient(x, self.factor))
        return output

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.block.named_parameters(*args, **kwargs)


@wrong("a partial value taken for the whole", _SMALLEST, _WHY)
@argument_of(run_module)
def shares_of_tokens_not_summed(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each rank keeps its own tokens of its share of the output, and never adds the other ranks' shares of these."""
    block.__class__ = _Cut
    return _summed_later(block, mesh)


class _Cut(GatedBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share: DTensor = self.change(x)
        taken_for_whole = DTensor.from_local(share.to_local(), share.device_mesh, [Replicate()], run_check=False)
        change: torch.Tensor = taken_for_whole.redistribute(placements=[Shard(0)]).full_tensor()
        return x + change


@wrong(
    "a reduction missing in the backward",
    _SMALLEST,
    "of one token on two ranks the second has none, and gets no gradient of the first's",
    claim="gradients_equal_unsharded",
)
@argument_of(run_module)
def gradient_of_own_tokens_alone(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each rank cuts its tokens from x itself, so that the gradients of the others' never come back to it."""

    def cut(module: nn.Module, handed: tuple[torch.Tensor]) -> torch.Tensor:
        (x,) = handed
        each = -(-len(x) // mesh.size())
        own = x[each * mesh.get_local_rank() :][:each]
        return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride())

    sequence_parallel(block, mesh).register_forward_pre_hook(cut, prepend=True)
    return block


@wrong("a reduction missing in the backward", _DATA_PARALLEL, _ROWS, claim="gradients_equal_unsharded")
@argument_of(run_module)
def gradients_of_own_rows(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Data parallelism that never reduces: as when accumulation of gradients is not ended before the update."""
    parallel = data_parallel(block, mesh)
    parallel.require_backward_grad_sync = False  # type: ignore[assignment]
    return parallel


@wrong("a reduction missing in the backward", _DATA_PARALLEL, _ROWS, claim="gradients_equal_unsharded")
@argument_of(run_module)
def one_parameter_left_out(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Data parallelism ignores one parameter, so every rank keeps its own gradient of it."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(block, ["up.weight"])  # type: ignore[no-untyped-call]
    return data_parallel(block, mesh)


@wrong("replicas that differ", _DATA_PARALLEL, "the buffers of one rank are right")
@argument_of(run_module)
def own_buffers(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Data parallelism that never broadcasts buffers."""
    parallel = data_parallel(block, mesh)
    parallel.broadcast_buffers = False  # type: ignore[assignment]
    return parallel


@wrong("a reduction missing in the backward", _FULLY_SHARDED, _ROWS, claim="gradients_equal_unsharded")
@argument_of(run_module)
def shards_of_own_gradients(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Instead of a reduce-scatter, each rank keeps its shard from its local gradient."""
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


@wrong("wrong divisor or wrong group", _FULLY_SHARDED, _ROWS, claim="gradients_equal_unsharded")
@argument_of(run_module)
def gradients_added_up(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Gradients are added up over the ranks and not divided, so that a step grows with the number of ranks."""
    parallel = fully_sharded(block, mesh)
    assert isinstance(parallel, FSDPModule)
    parallel.set_gradient_divide_factor(1.0)
    parallel.set_force_sum_reduction_for_comms(True)
    return parallel
