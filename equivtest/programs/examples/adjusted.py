"""FSDP2 after calls that change its collectives, the dims that it shards, and what it gathers.

No call may change a result.

Source: FSDPModule, and `shard_placement_fn` of fully_shard, in torch/distributed/fsdp/_fully_shard/_fully_shard.py;
AllGather and ReduceScatter in _fsdp_api.py; fsdp_pre_all_gather in _fsdp_param.py (2.13.0).
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, cast

import torch
from torch import distributed, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, share_comm_ctx
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import Shard

from equivtest.programs.examples.gated import GatedBlock, TwoBlocks, spoil
from equivtest.programs.examples.narrow import WIDE
from equivtest.programs.examples.whole_mesh import write


def fully_sharded_by_calls(
    block: nn.Module, mesh: DeviceMesh, *, collectives: str, parameters: str, from_the_end: bool
) -> nn.Module:
    """Shards each layer by FSDP2, then the block.

    Args:
        collectives: Which collectives run, and who allocates their memory. If 'default', FSDP2 decides both. If
            'allocated', the process group allocates. If 'own', the classes of this module decide both.
        parameters: If 'restored', the parameters are gathered and copied before the forward, and later written back.
            Between the two they are converted to another dtype and back. If 'in two', the ranks gather the sign and
            the magnitude of each element. If 'in groups', no layer is sharded alone, and the first two weights are on
            another mesh of the same ranks. If 'default', none of these.
        from_the_end: Whether dims of parameters are counted from the end. Weights are sharded on their last dim, or on
            the middle one of three, if the number of ranks divides it.
    """
    placement = partial(dim_from_the_end, mesh) if from_the_end else None
    if parameters == "in groups":
        other = _fsdp_common.FSDPMeshInfo(copied(mesh), shard_mesh_dim=0)
        apart = partial(tall_apart, other, placement)
        fully_shard(block, mesh=mesh, shard_placement_fn=apart, reshard_after_forward=True)
        return block
    for part in (*block.children(), block):
        fully_shard(part, mesh=mesh, shard_placement_fn=placement)
    for layer in cast("Any", block.children()):
        if collectives == "allocated":
            layer.set_allocate_memory_from_process_group_for_comm(True)
        if collectives == "own":
            layer.set_custom_all_gather(OwnAllGather())
            layer.set_custom_reduce_scatter(OwnReduceScatter())
        if parameters == "restored":
            restore(layer)
        if parameters == "in two":
            gather_in_two(layer)
    return block


def dim_from_the_end(mesh: DeviceMesh, parameter: nn.Parameter) -> Shard:
    dim = -2 if parameter.ndim == 3 else -1
    return Shard(dim if parameter.shape[dim] % mesh.size() == 0 else -parameter.ndim)


@cache
def copied(mesh: DeviceMesh) -> DeviceMesh:
    """Returns a mesh of the same ranks, with another process group. Each process makes it once."""
    group = distributed.new_group(mesh.mesh.tolist(), use_local_synchronization=True)
    return DeviceMesh.from_group(cast("Any", group), mesh.device_type)


def tall_apart(other: _fsdp_common.FSDPMeshInfo, placement: Any, parameter: nn.Parameter) -> Any:
    """Returns the placement of a parameter. It is on another mesh if the parameter has more rows than columns."""
    chosen = placement(parameter) if placement else None
    return _fsdp_common.ShardPlacementResult(chosen, other) if parameter.shape[0] > parameter.shape[-1] else chosen


class OwnMemory:
    """Allocates the buffers of collectives, which may use no other memory, as if a device must know the buffers."""

    def __init__(self) -> None:
        self.known: set[int] = set()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer = torch.empty(size, dtype=dtype, device=device)
        self.known.add(buffer.untyped_storage().data_ptr())
        return buffer

    def require_known(self, *buffers: torch.Tensor) -> None:
        if any(buffer.untyped_storage().data_ptr() not in self.known for buffer in buffers):
            raise ValueError("a collective got a buffer that it has not allocated")


class OwnAllGather(OwnMemory, AllGather):
    """Gathers into a list of tensors."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:  # noqa: FBT001, FBT002  # torch's
        self.require_known(output_tensor, input_tensor)
        gathered = list(output_tensor.chunk(group.size()))
        return distributed.all_gather(gathered, input_tensor, group=group, async_op=async_op)


class OwnReduceScatter(OwnMemory, ReduceScatter):
    """Reduces all shards on all ranks, and keeps one."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:  # noqa: FBT001, FBT002  # torch's
        self.require_known(output_tensor, input_tensor)
        distributed.all_reduce(input_tensor, op=op, group=group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def restore(layer: Any) -> None:
    """Copies the gathered parameters, spoils the shards, converts them, and writes the copies into them."""
    layer.unshard()
    whole = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    layer.reshard()
    dtype = next(layer.parameters()).dtype
    with torch.no_grad():
        spoil(layer.parameters())
        layer.unshard()
        layer.to(torch.float32 if dtype == torch.float64 else torch.float64).to(dtype)
    write(layer, whole)


def gather_in_two(layer: nn.Module) -> None:
    for parameter in cast("Any", layer.parameters()):
        shard = parameter._local_tensor  # `to_local` returns another tensor
        shard.fsdp_pre_all_gather = partial(in_two, shard, parameter.placements[0].dim)
        shard.fsdp_post_all_gather = joined


def in_two(
    shard: torch.Tensor, dim: int, mesh: DeviceMesh, size: torch.Size, stride: Any, module: Any, policy: Any
) -> tuple[tuple[torch.Tensor, torch.Tensor], None]:
    """Returns magnitudes and signs of a shard, padded to the length of the longest shard, and no metadata."""
    length = -(-size[dim] // mesh.size())
    padded = shard.new_zeros((*size[:dim], length, *size[dim + 1 :]))
    padded.narrow(dim, 0, shard.size(dim)).copy_(shard)
    return (padded.abs(), padded.sign().to(torch.int8)), None


@torch.no_grad()
def joined(gathered: Any, metadata: None, dtype: torch.dtype, *, out: torch.Tensor | None = None) -> Any:
    """Returns the gathered elements and the memory that FSDP2 may free, or writes into a parameter's memory."""
    magnitudes, signs = gathered
    whole = magnitudes.to(dtype) * signs
    if out is None:
        return whole, [whole]
    with _unsafe_preserve_version_counter(out):
        out.copy_(whole.view(-1)[: out.numel()].view_as(out))
    return None


class SometimesGated(GatedBlock):
    """The block y = x + W3 h + b with h = relu(W1 x) * (W2 x) if the number of rows is odd, and relu(W1 x) if not."""

    def change(self, x: torch.Tensor) -> Any:
        return super().change(x) if len(x) % 2 else self.down(nn.functional.relu(self.gate(x)))


def sometimes_gated() -> nn.Module:
    return SometimesGated(2, 5)


def fully_sharded_with_unused_layer(
    block: SometimesGated, mesh: DeviceMesh, *, together: bool, num_buffers: int
) -> nn.Module:
    """Shards a block. Some ranks do not run one of its layers, and reduce zeros for this layer.

    Args:
        together: Whether that layer is in a group with another layer. FSDP2 widens what each layer of the group
            returns, and the last layer computes in float64. Otherwise all layers are in one group. No third group is
            gathered in the backward, because torch gathers the first group earlier if not all of it has run.
        num_buffers: How many inputs of reductions FSDP2 may keep at once.
    """
    policy = MixedPrecisionPolicy()
    if together:
        dtype = block.gate.weight.dtype
        fully_shard(cast("Any", [block.gate, block.up]), mesh=mesh, mp_policy=MixedPrecisionPolicy(output_dtype=WIDE))
        policy = MixedPrecisionPolicy(param_dtype=WIDE, output_dtype=dtype, cast_forward_inputs=False)
    sharded: Any = fully_shard(block, mesh=mesh, mp_policy=policy)
    sharded.set_reduce_scatter_unused_params(True)
    sharded.set_reduce_scatter_max_input_buffers(num_buffers)
    return block


def fully_sharded_in_one_context(blocks: TwoBlocks, mesh: DeviceMesh, *, by_layers: bool = True) -> nn.Module:
    """Shards two blocks that share the streams of their communication. The whole model is not sharded.

    Args:
        by_layers: Whether each layer of the second block is sharded alone, as in the first block. If not, torch fails.
            See finding 143.
    """
    for block, parts in ((blocks.first, True), (blocks.second, by_layers)):
        for layer in block.children() if parts else ():
            fully_shard(layer, mesh=mesh)
        fully_shard(block, mesh=mesh)
    share_comm_ctx(cast("Any", [blocks.first, blocks.second]))
    return blocks
