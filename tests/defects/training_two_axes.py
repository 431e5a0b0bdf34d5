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
from tests.defects.defect import Replacing, answers_of

wrong_fsdp2_tp = Replacing("fsdp2_tp_mlp")
wrong_hsdp = Replacing("hsdp_mlp")


class _DividedByAll(Fsdp2TpRun):
    """Tensor parallelism under FSDP2 that divides gradients by the whole world's size."""

    def build(self) -> nn.Module:
        model = super().build()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(float(self.case.world_size))
        return model


averaged_over_every_rank = wrong_fsdp2_tp(
    "wrong divisor or wrong group",
    TwoAxisCase(world_size=2, mesh=(1, 2), hidden_features=2, biases=("out_proj",), requires_grad=("out_proj.bias",)),
    "two ranks of one row, whose gradient is no average; each has a hidden feature, as torch needs it",
    claim="gradients_equal_unsharded",
)(answers_of(_DividedByAll))


class _Unstrided(Fsdp2TpRun):
    """Tensor parallelism under FSDP2 that declares the first axis as the first to divide its parameters."""

    def keep(self, name: str, tensor: torch.Tensor | None) -> None:
        if isinstance(tensor, DTensor) and name == "param.in_proj.weight":
            tensor = on_mesh(tensor, tensor.device_mesh, (Shard(0), Shard(0)))
        super().keep(name, tensor)


strided_shards_taken_for_plain_ones = wrong_fsdp2_tp(
    "shard order",
    TwoAxisCase(world_size=4, mesh=(2, 2), hidden_features=4, requires_grad=("out_proj.weight",)),
    "four ranks need one hidden feature each for two of them to be at each other's place",
)(answers_of(_Unstrided))


class _Unreduced(HsdpRun):
    """HSDP that averages gradients along the shards' axis and never along the replicas'."""

    def build(self) -> nn.Module:
        return self.shard(Mlp(self.case, self.given), self.mesh["shard"])

    def keep(self, name: str, tensor: torch.Tensor | None) -> None:
        """Declares the tensor as reduced."""
        if isinstance(tensor, DTensor) and tensor.dim() and tensor.device_mesh.ndim == 1:
            tensor = on_mesh(tensor, self.mesh, (Replicate(), *tensor.placements))
        super().keep(name, tensor)


replicas_not_reduced = wrong_hsdp(
    "a reduction missing in the backward",
    TwoAxisCase(world_size=2, mesh=(2, 1), style="hsdp", biases=("out_proj",), requires_grad=("out_proj.bias",)),
    "two replicas with one row each",
    claim="gradients_equal_unsharded",
)(answers_of(_Unreduced))


class _Lost(HsdpRun):
    """HSDP that forgets the gradients of earlier micro-batches before the ranks of a column reduce the sum."""

    def synchronization(self, *, is_last: bool) -> AbstractContextManager[None]:
        context = super().synchronization(is_last=is_last)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    group._partial_reduce_output = None
        return context


sums_of_micro_batches_lost = wrong_hsdp(
    "a term missing",
    TwoAxisCase(
        world_size=1,
        style="hsdp",
        biases=("out_proj",),
        requires_grad=("out_proj.bias",),
        micro_batches=2,
        scatters_every=True,
    ),
    "a second micro-batch follows the lost one; a bias has a gradient for any value of x",
    claim="gradients_equal_unsharded",
)(answers_of(_Lost))


class _NotAveraged(HsdpRun):
    """HSDP that leaves the sum divided by the factor alone."""

    def average(self, reduced: torch.Tensor) -> None:
        pass


divided_by_the_factor_alone = wrong_hsdp(
    "wrong divisor or wrong group",
    TwoAxisCase(world_size=1, style="hsdp", requires_grad=("out_proj.weight",), division="factor"),
    "one rank divides by the factor too",
    claim="gradients_equal_unsharded",
)(answers_of(_NotAveraged))


def on_mesh(tensor: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """Declares the local tensor on another mesh and with other placements."""
    local = tensor.to_local().detach()
    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
    made.requires_grad_(tensor.requires_grad)
    return made


class _Released(HsdpRun):
    """Releases parameters between forward and backward, and gathers them again, although the case keeps them."""

    def build(self) -> nn.Module:
        model = super().build()
        self.parallel.set_reshard_after_forward(reshard_after_forward=True)
        return model


released_all_the_same = wrong_hsdp(
    "other collectives than documented",
    TwoAxisCase(
        world_size=2, mesh=(1, 2), style="hsdp", reshards=False, requires_grad=("out_proj.weight",), records=True
    ),
    "two ranks share each parameter; one rank gathers nothing",
    claim="uses_only_collectives",
)(answers_of(_Released))


class _Syncing(Fsdp2TpRun):
    """Reduces gradients after each micro-batch and adds these sums, although they should be added on each rank."""

    def synchronization(self, *, is_last: bool) -> AbstractContextManager[None]:
        return super().synchronization(is_last=True)


reduced_in_every_micro_batch = wrong_fsdp2_tp(
    "other collectives than documented",
    TwoAxisCase(world_size=2, mesh=(2, 1), micro_batches=2, requires_grad=("out_proj.weight",), records=True),
    "two ranks share each parameter, and the first of two micro-batches reduces nothing",
    claim="uses_only_collectives",
)(answers_of(_Syncing))


class _AtOnce(Fsdp2TpRun):
    """The model is fully sharded as a whole, its layers forgotten: all parameters are whole at the same time."""

    def shard(self, model: Mlp, mesh: DeviceMesh) -> nn.Module:
        self.parallel = fully_shard(model, mesh=mesh, reshard_after_forward=self.case.reshards)
        return model


layers_gathered_at_once = wrong_fsdp2_tp(
    "other collectives than documented",
    TwoAxisCase(world_size=2, mesh=(2, 1), requires_grad=("out_proj.weight",), records=True),
    "two ranks share each parameter; one rank gathers nothing",
    claim="uses_only_collectives",
)(answers_of(_AtOnce))


class _Scattered(Fsdp2TpRun):
    """The output's sum is scattered along its features, as if one were to go on from there, and gathered again."""

    def plan(self) -> dict[str, ParallelStyle]:
        scattered = RowwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        whole = PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Replicate())
        return super().plan() | {"out_proj": scattered, "": whole}


output_scattered_and_gathered = wrong_fsdp2_tp(
    "other collectives than documented",
    TwoAxisCase(world_size=2, mesh=(1, 2), hidden_features=2, requires_grad=("out_proj.weight",), records=True),
    "two ranks of a row, each with a hidden feature, as torch needs it",
    claim="uses_only_collectives",
)(answers_of(_Scattered))


class _Sent(Fsdp2TpRun):
    """The first rank of each row sends the others the rows of the batch that they have already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.broadcast(x.detach().clone(), group=self.mesh["tp"].get_group(), group_src=0)
        return super().forward(x)


input_sent_along_the_row = wrong_fsdp2_tp(
    "other collectives than documented",
    TwoAxisCase(world_size=1, requires_grad=("out_proj.weight",), records=True),
    "a row of one rank sends too",
    claim="uses_only_collectives",
)(answers_of(_Sent))
