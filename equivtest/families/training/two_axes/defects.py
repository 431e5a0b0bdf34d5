"""Data parallelism on a mesh of two axes that is wrong in one way each."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleOutput, RowwiseParallel

from equivtest.families.training.subject import Mlp
from equivtest.families.training.two_axes.case import TwoAxisCase
from equivtest.families.training.two_axes.subject import Fsdp2TpRun, HsdpRun
from equivtest.kit.subject import Answers, Given


def averaged_over_every_rank(case: TwoAxisCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Tensor parallelism under FSDP2 whose gradients are divided by the whole world's size."""
    return _DividedByAll(case, mesh, given).answers()


class _DividedByAll(Fsdp2TpRun):
    def build(self) -> nn.Module:
        model = super().build()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(float(self.case.world_size))
        return model


def strided_shards_taken_for_plain_ones(case: TwoAxisCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Tensor parallelism under FSDP2 that says of its parameters that the first axis divides first."""
    return _Unstrided(case, mesh, given).answers()


class _Unstrided(Fsdp2TpRun):
    def keep(self, name: str, tensor: torch.Tensor | None) -> None:
        if isinstance(tensor, DTensor) and name == "param.in_proj.weight":
            tensor = on_mesh(tensor, tensor.device_mesh, (Shard(0), Shard(0)))
        super().keep(name, tensor)


def replicas_not_reduced(case: TwoAxisCase, mesh: DeviceMesh, given: Given) -> Answers:
    """HSDP whose gradients are averaged along the shards' axis and never along the replicas'."""
    return _Unreduced(case, mesh, given).answers()


class _Unreduced(HsdpRun):
    def build(self) -> nn.Module:
        return self.shard(Mlp(self.case, self.given), self.mesh["shard"])

    def keep(self, name: str, tensor: torch.Tensor | None) -> None:
        """As if it had been reduced."""
        if isinstance(tensor, DTensor) and tensor.dim() and tensor.device_mesh.ndim == 1:
            tensor = on_mesh(tensor, self.mesh, (Replicate(), *tensor.placements))
        super().keep(name, tensor)


def on_mesh(tensor: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """What this rank holds, under another mesh and other placements."""
    local = tensor.to_local().detach()
    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
    made.requires_grad_(tensor.requires_grad)
    return made


def released_all_the_same(case: TwoAxisCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Parameters that are to be kept between forward and backward are released, and gathered once more."""
    return _Released(case, mesh, given).answers()


class _Released(HsdpRun):
    def build(self) -> nn.Module:
        model = super().build()
        self.parallel.set_reshard_after_forward(reshard_after_forward=True)
        return model


def reduced_in_every_micro_batch(case: TwoAxisCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Gradients that are to be added up on each rank are reduced after each micro-batch, and these sums added."""
    return _Syncing(case, mesh, given).answers()


class _Syncing(Fsdp2TpRun):
    def synchronization(self, *, is_last: bool) -> AbstractContextManager[None]:
        return super().synchronization(is_last=True)


def layers_gathered_at_once(case: TwoAxisCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The model is fully sharded as a whole, its layers forgotten: all parameters are whole at the same time."""
    return _AtOnce(case, mesh, given).answers()


class _AtOnce(Fsdp2TpRun):
    def shard(self, model: Mlp, mesh: DeviceMesh) -> nn.Module:
        self.parallel = fully_shard(model, mesh=mesh, reshard_after_forward=self.case.reshards)
        return model


def output_scattered_and_gathered(case: TwoAxisCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The output's sum is scattered along its features, as if one were to go on from there, and gathered again."""
    return _Scattered(case, mesh, given).answers()


class _Scattered(Fsdp2TpRun):
    def plan(self) -> dict[str, ParallelStyle]:
        scattered = RowwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        whole = PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Replicate())
        return super().plan() | {"out_proj": scattered, "": whole}


def input_sent_along_the_row(case: TwoAxisCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The first rank of each row sends the others the rows of the batch that they have already."""
    return _Sent(case, mesh, given).answers()


class _Sent(Fsdp2TpRun):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.broadcast(x.detach().clone(), group=self.mesh["tp"].get_group(), group_src=0)
        return super().forward(x)
