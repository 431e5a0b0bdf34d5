"""FSDP2 with all its options: one branch of the module for each argument and each method.

Each branch is its own root, so that none changes another, and a gradient names what is wrong.

Source: torch/distributed/fsdp/_fully_shard/_fully_shard.py and _fsdp_api.py (2.13.0): according to each description the
module computes the same, except if an option sets the divisor of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

from tests.wrappers.branches import Branch, Shifted

Tell = Callable[["Branch", DeviceMesh], None]

TOLD: dict[str, Tell] = {}
"""Branch -> function that shards it with its options; `TELLS` has the torch names that these are about."""

TELLS: dict[str, tuple[str, ...]] = {}


def tells(*of: str) -> Callable[[Tell], Tell]:
    """Registers a branch's options with the public names that they are about, for arguments 'name(argument)'."""

    def keep(tell: Tell) -> Tell:
        TOLD[tell.__name__], TELLS[tell.__name__] = tell, of
        return tell

    return keep


def told(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shards every branch with its options."""
    for name, branch in module.named_children():
        TOLD[name](cast("Branch", branch), mesh)
    return module


def shard(branch: Branch, mesh: DeviceMesh, **arguments: Any) -> Any:
    """Shards both layers and the rest of the branch, each gathered separately; returns the branch as torch makes it."""
    for layer in (branch.up, branch.down):
        fully_shard(layer, mesh=mesh, **arguments)
    return fully_shard(branch, mesh=mesh, **arguments)


def layers_of(branch: Branch) -> list[FSDPModule]:
    return [cast("FSDPModule", branch.up), cast("FSDPModule", branch.down)]


@tells("fully_shard(module)", "fully_shard(mesh)")
def together(branch: Branch, mesh: DeviceMesh) -> None:
    fully_shard([branch.up, branch.down], mesh=mesh)
    fully_shard(branch, mesh=mesh)


@tells("fully_shard(reshard_after_forward)")
def kept(branch: Branch, mesh: DeviceMesh) -> None:
    shard(branch, mesh, reshard_after_forward=False)


@tells("fully_shard(reshard_after_forward)")
def resharded(branch: Branch, mesh: DeviceMesh) -> None:
    shard(branch, mesh, reshard_after_forward=True)


@tells("fully_shard(reshard_after_forward)")
def resharded_to_two(branch: Branch, mesh: DeviceMesh) -> None:
    shard(branch, mesh, reshard_after_forward=2 if mesh.size() == 4 else True)


@tells("fully_shard(shard_placement_fn)")
def by_columns(branch: Branch, mesh: DeviceMesh) -> None:
    shard(branch, mesh, shard_placement_fn=lambda each: Shard(1) if each.shape == (1, 12) else None)


@tells("fully_shard(shard_placement_fn)")
def by_columns_of_a_mesh(branch: Branch, mesh: DeviceMesh) -> None:
    of_mesh = FSDPMeshInfo(mesh, shard_mesh_dim=0)

    def placed(parameter: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(Shard(int(parameter.shape == (1, 12))), of_mesh)

    shard(branch, mesh, shard_placement_fn=placed)


@tells("fully_shard(mp_policy)", "MixedPrecisionPolicy(param_dtype)", "MixedPrecisionPolicy(reduce_dtype)",
       "MixedPrecisionPolicy(output_dtype)")  # fmt: skip
def in_float64(branch: Branch, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(torch.float64, torch.float64, branch.up.weight.dtype)
    fully_shard(branch, mesh=mesh, mp_policy=policy)


@tells("MixedPrecisionPolicy(cast_forward_inputs)")
def inputs_not_cast(branch: Branch, mesh: DeviceMesh) -> None:
    shard(branch, mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))


@tells("fully_shard(offload_policy)", "CPUOffloadPolicy(pin_memory)")
def offloaded(branch: Branch, mesh: DeviceMesh) -> None:
    shard(branch, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


@tells("fully_shard(ignored_params)")
def ignored(branch: Branch, mesh: DeviceMesh) -> None:
    shard(branch, mesh, ignored_params={branch.down.bias})


@tells("FSDPModule.unshard(async_op)", "UnshardHandle.wait")
def unsharded_before(branch: Branch, mesh: DeviceMesh) -> None:
    shard(branch, mesh)

    def unshard(*_: Any) -> None:
        first, second = layers_of(branch)
        first.unshard()
        handle = second.unshard(async_op=True)
        if handle is not None:
            handle.wait()

    branch.register_forward_pre_hook(unshard)


@tells("FSDPModule.reshard")
def resharded_by_hand(branch: Branch, mesh: DeviceMesh) -> None:
    shard(branch, mesh, reshard_after_forward=False)

    def reshard(*_: Any) -> None:
        for layer in layers_of(branch):
            layer.reshard()

    branch.register_forward_hook(reshard)


@tells("FSDPModule.set_reshard_after_forward(reshard_after_forward)", "FSDPModule.set_reshard_after_forward(recurse)")
def told_to_reshard(branch: Branch, mesh: DeviceMesh) -> None:
    shard(branch, mesh).set_reshard_after_forward(False, recurse=False)
    branch.up.set_reshard_after_forward(False)  # type: ignore[operator]


@tells("FSDPModule.set_modules_to_forward_prefetch(modules)", "FSDPModule.set_modules_to_backward_prefetch(modules)")
def prefetched(branch: Branch, mesh: DeviceMesh) -> None:
    root = shard(branch, mesh)
    first, second = layers_of(branch)
    root.set_modules_to_forward_prefetch([first, second])
    root.set_modules_to_backward_prefetch([second, first])
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])


class FilledWithNan:
    """Memory for a collective that no code may read before it is written."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(size, torch.nan, dtype=dtype, device=device)


class OwnAllGather(FilledWithNan, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002
    ) -> distributed.Work | None:
        work: distributed.Work | None = distributed.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        return work


class OwnReduceScatter(FilledWithNan, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: FBT001, FBT002
    ) -> distributed.Work | None:
        work: distributed.Work | None = distributed.reduce_scatter_tensor(
            output_tensor, input_tensor, op, group, async_op
        )
        return work


@tells("FSDPModule.set_custom_all_gather(comm)", "FSDPModule.set_custom_reduce_scatter(comm)")
def by_own_collectives(branch: Branch, mesh: DeviceMesh) -> None:
    shard(branch, mesh)
    for layer in layers_of(branch):
        layer.set_custom_all_gather(OwnAllGather())
        layer.set_custom_reduce_scatter(OwnReduceScatter())


def divides(by: float) -> Callable[[torch.Tensor], None]:
    def divide(reduced: torch.Tensor) -> None:
        reduced.div_(by)

    return divide


@tells("FSDPModule.set_gradient_divide_factor(factor)", "FSDPModule.set_force_sum_reduction_for_comms(enable)",
       "FSDPModule.set_all_reduce_hook(hook)")  # fmt: skip
def divided_by_a_hook(branch: Branch, mesh: DeviceMesh) -> None:
    """Adds gradients, since gloo supports only sums, and divides them afterwards."""
    shard(branch, mesh)
    for layer in layers_of(branch):
        layer.set_force_sum_reduction_for_comms(True)
        layer.set_gradient_divide_factor(1.0)
        layer.set_all_reduce_hook(divides(mesh.size()))


@tells("FSDPModule.set_reduce_scatter_divide_factor(factor)")
def divided_by_the_old_name(branch: Branch, mesh: DeviceMesh) -> None:
    shard(branch, mesh)
    for layer in layers_of(branch):
        layer.set_reduce_scatter_divide_factor(float(mesh.size()))


@tells("FSDPModule.set_reduce_scatter_unused_params(reduce_scatter_unused_params)",
       "FSDPModule.set_reduce_scatter_unused_params(recurse)")  # fmt: skip
def unused_on_some_ranks(branch: Branch, mesh: DeviceMesh) -> None:
    sharded = fully_shard(branch, mesh=mesh)
    sharded.set_reduce_scatter_unused_params(True, recurse=True)


@tells("FSDPModule.set_reduce_scatter_max_input_buffers(max_input_buffers)",
       "FSDPModule.set_reduce_scatter_max_input_buffers(recurse)")  # fmt: skip
def two_buffers(branch: Branch, mesh: DeviceMesh) -> None:
    shard(branch, mesh).set_reduce_scatter_max_input_buffers(2, recurse=True)


@tells("FSDPModule.set_separate_reduce_scatter_group(enable)", "FSDPModule.set_separate_reduce_scatter_group(recurse)")
def in_a_group_of_its_own(branch: Branch, mesh: DeviceMesh) -> None:
    shard(branch, mesh).set_separate_reduce_scatter_group(True, recurse=True)


@tells("FSDPModule.set_unshard_in_backward(unshard_in_backward)")
def not_unsharded_in_backward(branch: Branch, mesh: DeviceMesh) -> None:
    shift = cast("Shifted", branch).shift
    fully_shard(shift, mesh=mesh).set_unshard_in_backward(False)
    shard(branch, mesh)


@tells("FSDPModule.set_allocate_memory_from_process_group_for_comm(enable)")
def in_memory_of_the_group(branch: Branch, mesh: DeviceMesh) -> None:
    shard(branch, mesh)
    for layer in layers_of(branch):
        layer.set_allocate_memory_from_process_group_for_comm(True)


@tells("FSDPModule.set_is_last_backward(is_last_backward)")
def last_backward(branch: Branch, mesh: DeviceMesh) -> None:
    shard(branch, mesh).set_is_last_backward(True)


@tells(
    "FSDPModule.set_requires_gradient_sync(requires_gradient_sync)",
    "FSDPModule.set_requires_gradient_sync(recurse)",
    "FSDPModule.set_requires_all_reduce(requires_all_reduce)",
    "FSDPModule.set_requires_all_reduce(recurse)",
)
def synchronized_again(branch: Branch, mesh: DeviceMesh) -> None:
    root = shard(branch, mesh)
    root.set_requires_gradient_sync(False)
    root.set_requires_all_reduce(False)
    for layer in (root, *layers_of(branch)):
        layer.set_requires_gradient_sync(True, recurse=False)
        layer.set_requires_all_reduce(True, recurse=False)


@tells("FSDPModule.reset_iter_state")
def after_a_failure(branch: Branch, mesh: DeviceMesh) -> None:
    """A forward that raises before the one that counts."""
    root = shard(branch, mesh)

    def fail(*_: Any) -> None:
        raise ArithmeticError

    handle = branch.down.register_forward_pre_hook(fail)
    try:
        branch(torch.zeros(1, 2, dtype=branch.up.weight.dtype))
    except ArithmeticError:
        root.reset_iter_state()
    handle.remove()


@tells("register_fsdp_forward_method(module)", "register_fsdp_forward_method(method_name)")
def by_another_method(branch: Branch, mesh: DeviceMesh) -> None:
    fully_shard(branch, mesh=mesh)
    register_fsdp_forward_method(branch, "computed")
    branch.forward = lambda x: branch.computed(x)  # type: ignore[method-assign]


@tells("share_comm_ctx(modules)")
def with_one_context(branch: Branch, mesh: DeviceMesh) -> None:
    shard(branch, mesh)
    share_comm_ctx(layers_of(branch))
