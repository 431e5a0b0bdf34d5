"""Steps of two micro-batches under DistributedDataParallel and FSDP2, one branch for each of their options.

Each branch is wrapped separately, so that none changes another, and a gradient names what is wrong.

Source: in torch/nn/parallel distributed.py; in torch/distributed algorithms/ddp_comm_hooks, fsdp/_fully_shard,
optim/zero_redundancy_optimizer.py and checkpoint/state_dict.py (2.13.0).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar, cast

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.nn.parallel import DistributedDataParallel

from tests.wrappers.branches_in_steps import REPLICATED, Branch, momentum

Tensors = dict[str, torch.Tensor]


def replicated(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Wraps each branch in DistributedDataParallel, with its own arguments."""
    for name, branch in list(module.named_children()):
        wrapped = DistributedDataParallel(branch, process_group=mesh.get_group(), **REPLICATED[name])
        if name == "hooked":
            wrapped.register_comm_hook(mesh.get_group(), default_hooks.allreduce_hook)
        setattr(module, name, wrapped)
    return module


Tell = Callable[[FSDPModule, bool], None]
"""Sets the options of a sharded branch before each micro-batch; the bool is True for the last one."""


def _synchronized_last(branch: FSDPModule, is_last: bool) -> None:  # noqa: FBT001
    branch.set_requires_gradient_sync(is_last)


def _layers_synchronized_last(branch: FSDPModule, is_last: bool) -> None:  # noqa: FBT001
    branch.set_requires_gradient_sync(is_last, recurse=False)
    for layer in (branch.up, branch.down):  # type: ignore[attr-defined]
        layer.set_requires_gradient_sync(is_last, recurse=False)


def _last_backward(branch: FSDPModule, is_last: bool) -> None:  # noqa: FBT001
    branch.set_is_last_backward(is_last)


def _kept_after_backward(branch: FSDPModule, is_last: bool) -> None:  # noqa: FBT001
    branch.set_requires_gradient_sync(is_last)
    branch.set_reshard_after_backward(is_last, recurse=True)


def _layer_kept_after_backward(branch: FSDPModule, is_last: bool) -> None:  # noqa: FBT001
    branch.set_reshard_after_backward(is_last, recurse=False)


def _told_nothing(branch: FSDPModule, is_last: bool) -> None:  # noqa: FBT001
    pass


TOLD_SHARDED: dict[str, Tell] = {
    "synchronized_each_time": _told_nothing,
    "synchronized_last": _synchronized_last,
    "layers_synchronized_last": _layers_synchronized_last,
    "waiting_at_the_last_backward": _last_backward,
    "kept_after_backward": _kept_after_backward,
    "layer_kept_after_backward": _layer_kept_after_backward,
    "unused_in_the_layers": _synchronized_last,
}


def sharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shards each branch fully, its layers separately."""
    for branch in cast("list[Branch]", list(module.children())):
        for part in (branch.up, branch.down, branch):
            fully_shard(part, mesh=mesh)
    return module


def _all_reduced_last(branch: FSDPModule, is_last: bool) -> None:  # noqa: FBT001
    branch.set_requires_all_reduce(is_last)


def _layers_all_reduced_last(branch: FSDPModule, is_last: bool) -> None:  # noqa: FBT001
    for layer in (branch, branch.up, branch.down):  # type: ignore[attr-defined]
        layer.set_requires_all_reduce(is_last, recurse=False)


TOLD_BOTH_WAYS: dict[str, Tell] = {
    "reduced_each_time": _told_nothing,
    "reduced_last": _synchronized_last,
    "all_reduced_last": _all_reduced_last,
    "layers_all_reduced_last": _layers_all_reduced_last,
    "of_dtensors": _synchronized_last,
    "unused_in_both_ways": _all_reduced_last,
}


def _entered(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    """Own rows as what every rank of the mesh would have."""
    return tuple(DTensor.from_local(each, mesh, [Replicate()] * mesh.ndim, run_check=False) for each in inputs)


def _left(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    return output.to_local()


def both_ways(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each branch replicated along dp and sharded along tp; 'of_dtensors' says so by the names of a mesh's axes."""
    for name, branch in cast("list[tuple[str, Branch]]", list(module.named_children())):
        named: dict[str, Any] = {}
        if name == "of_dtensors":
            distribute_module(branch, mesh, None, _entered, _left)
            named["dp_mesh_dims"] = DataParallelMeshDims(shard="tp", replicate="dp")
        for part in (branch.up, branch.down, branch):
            fully_shard(part, mesh=mesh, **named)
    return module


class Step:
    """Forward and backward of each micro-batch, and the update of what is trained."""

    optimizer_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.SGD

    def __init__(
        self, module: Any, mesh: DeviceMesh, micro_batches: list[Tensors], optimizer: torch.optim.Optimizer
    ) -> None:
        self.module, self.micro_batches = module, micro_batches
        self.mesh = mesh if mesh.ndim == 1 else mesh["dp"]  # along which the batch is divided
        self.optimizer = self.kept(optimizer)

    @classmethod
    def step(cls, *given: Any) -> Tensors:
        """Runs it, called as a step of a case is."""
        return cls(*given).run()

    def run(self) -> Tensors:
        """Runs it."""
        num_rows = self.summed(torch.tensor(sum(len(each["x"]) for each in self.micro_batches)))
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for number, each in enumerate(self.micro_batches):
            with self.told(is_last=number == len(self.micro_batches) - 1):
                loss = self.module(**each, reduction="sum")["loss"]
                torch.autograd.backward(loss * self.mesh.size() / num_rows)
            total = total.to(loss.dtype) + loss.detach()
        self.optimizer.step()
        return {"loss": self.summed(total) / num_rows}

    def kept(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Returns the optimizer for the next step."""
        return optimizer

    def told(self, *, is_last: bool) -> ExitStack:
        """Returns the context of a micro-batch."""
        raise NotImplementedError

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, which holds the sum over the ranks then."""
        distributed.all_reduce(tensor, group=self.mesh.get_group())
        return tensor


class ReplicatedStep(Step):
    """Gradients reduced after the last micro-batch; each rank updates a part of the parameters and tells the others.

    Between two steps ZeroRedundancyOptimizer hands its state to another one.
    """

    def kept(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # its package warns of torch.jit

        group, (settings,) = self.mesh.get_group(), optimizer.param_groups
        made = ZeroRedundancyOptimizer(
            [each for each in self.module.parameters() if each.requires_grad],
            type(optimizer),
            process_group=group,
            parameters_as_bucket_view=hasattr(self.module, "before"),
            lr=settings["lr"],
            momentum=settings["momentum"],
        )
        if before := getattr(self.module, "before", None):
            made.load_state_dict(self.told_by_the_first(before))
        self.module.before = made
        return made

    def told_by_the_first(self, before: Any) -> dict[str, Any]:
        """The state of all ranks' parts, on every rank."""
        before.consolidate_state_dict(to=0)
        is_first = self.mesh.get_local_rank() == 0
        held: list[Any] = [copy.deepcopy(before.state_dict()) if is_first else None]
        group = self.mesh.get_group()
        distributed.broadcast_object_list(held, src=distributed.get_global_rank(group, 0), group=group)
        return cast("dict[str, Any]", held[0])

    def told(self, *, is_last: bool) -> ExitStack:
        stack, is_first_step = ExitStack(), not getattr(self.module, "has_stepped", False)
        self.module.has_stepped = is_last or not is_first_step
        for name, branch in self.module.named_children():
            if not is_last and not ("static" in name and is_first_step):  # whose first backward must be reduced
                stack.enter_context(branch.no_sync())
        return stack


class ShardedStep(Step):
    """Sets each branch's options before each micro-batch; between two steps the state goes to another optimizer."""

    def kept(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        before = getattr(self.module, "before", None)
        if before is not None:
            options = states.StateDictOptions(full_state_dict=True, strict=False)  # unused ones have no state
            state = states.get_optimizer_state_dict(self.module, before, options=options)
            optimizer = momentum(self.module)
            optimizer.zero_grad()  # with gradients torch makes no state to load into
            states.set_optimizer_state_dict(self.module, optimizer, state, options=options)
        self.module.before = optimizer
        return optimizer

    def told(self, *, is_last: bool) -> ExitStack:
        for name, branch in self.module.named_children():
            {**TOLD_SHARDED, **TOLD_BOTH_WAYS}[name](branch, is_last)
        return ExitStack()


replicated_step, sharded_step = ReplicatedStep.step, ShardedStep.step
