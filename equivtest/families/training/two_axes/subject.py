"""Subjects that train a perceptron by torch on a mesh of two axes: FSDP2 or DDP with tensor parallelism, and HSDP.

Source: torch's tutorial of two-dimensional parallelism: ColwiseParallel and RowwiseParallel
(torch/distributed/tensor/parallel/style.py) on one axis, then fully_shard or DistributedDataParallel on the other axis;
torch/distributed/tensor/parallel/ddp.py, which turns parameters into plain tensors; fully_shard on both axes for HSDP,
with the methods of FSDPModule (torch/distributed/fsdp/_fully_shard/_fully_shard.py, 2.13.0).
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from equivtest.cases.subject import Answers, Given
from equivtest.families.training.data_parallel.subject import DataParallelRun, DdpRun, Fsdp2Run
from equivtest.families.training.subject import Mlp
from equivtest.families.training.two_axes.case import DIVIDE_FACTOR, TwoAxisCase


def fsdp2_tp_mlp(case: TwoAxisCase, mesh: DeviceMesh, given: Given) -> Answers:
    return Fsdp2TpRun(case, mesh, given).answers()


def hsdp_mlp(case: TwoAxisCase, mesh: DeviceMesh, given: Given) -> Answers:
    return HsdpRun(case, mesh, given).answers()


def ddp_tp_mlp(case: TwoAxisCase, mesh: DeviceMesh, given: Given) -> Answers:
    return DdpTpRun(case, mesh, given).answers()


@functools.cache
def named_mesh(device_type: str, mesh_shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Returns a mesh of the whole world with named axes, and with the ranks in the order of the harness's mesh."""
    return init_device_mesh(device_type, mesh_shape, mesh_dim_names=names)


class HsdpRun(Fsdp2Run):
    case: TwoAxisCase

    def __init__(self, case: TwoAxisCase, mesh: DeviceMesh, given: Given) -> None:
        super().__init__(case, named_mesh(mesh.device_type, case.mesh_shape, ("replicate", "shard")), given)

    @property
    def reshards_at_first(self) -> bool:
        """The opposite of the case, so that only `set_reshard_after_forward` makes the case's collectives."""
        return not self.case.reshards

    def build(self) -> nn.Module:
        model, case = super().build(), self.case
        self.parallel.set_reshard_after_forward(case.reshards)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                if case.adds_only:
                    module.set_force_sum_reduction_for_comms(True)
                if case.division == "factor":
                    module.set_gradient_divide_factor(DIVIDE_FACTOR)
                    module.set_all_reduce_hook(self.average)
        return model

    def average(self, reduced: torch.Tensor) -> None:
        """Turns a sum of all ranks' gradients, divided by DIVIDE_FACTOR, into their average."""
        reduced.div_(self.case.world_size / DIVIDE_FACTOR)

    def synchronization(self, *, is_last: bool) -> AbstractContextManager[None]:
        context = super().synchronization(is_last=is_last or self.case.scatters_every)
        self.parallel.set_requires_all_reduce(is_last or self.case.syncs_every)
        return context


class TensorParallelRun(DataParallelRun):
    """The base of runs whose ranks divide the hidden features along 'tp', and the batch along 'dp'."""

    case: TwoAxisCase

    def __init__(self, case: TwoAxisCase, mesh: DeviceMesh, given: Given) -> None:
        super().__init__(case, named_mesh(mesh.device_type, case.mesh_shape, ("dp", "tp")), given)

    def divided(self) -> Mlp:
        model = Mlp(self.case, self.given)
        parallelize_module(model, self.mesh["tp"], self.plan())
        return model

    def plan(self) -> dict[str, ParallelStyle]:
        return {
            "in_proj": ColwiseParallel(use_local_output=self.case.use_local_output),
            "out_proj": RowwiseParallel(),
        }

    def keep(self, name: str, tensor: torch.Tensor | None) -> None:
        """The program's activations are DTensors on one mesh axis. The answers are DTensors on both axes."""
        if isinstance(tensor, DTensor) and tensor.device_mesh.ndim == 1:
            tensor = self.of_both_axes(tensor)
        super().keep(name, tensor)

    def of_both_axes(self, tensor: DTensor) -> DTensor:
        """Returns the activation on both mesh axes, with the rows of the whole batch, without a collective."""
        whole = torch.empty((self.case.mesh[0] * tensor.shape[0], *tensor.shape[1:]), device="meta")
        placements, local = (Shard(0), *tensor.placements), tensor.to_local().detach()
        made = DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        made.requires_grad_(tensor.requires_grad)
        return made


class Fsdp2TpRun(TensorParallelRun, Fsdp2Run):
    def build(self) -> nn.Module:
        return self.shard(self.divided(), self.mesh["dp"])


class DdpTpRun(TensorParallelRun, DdpRun):
    """The parameters are the plain local tensors into which DistributedDataParallel turns the DTensors.

    After the first forward the module has no parameters. See finding 145.
    """

    def build(self) -> nn.Module:
        model = self.replicate(self.divided(), self.mesh["dp"])
        self.shards = {name: model.get_parameter(name) for name in self.case.parameter_names()}
        return model

    def parameter(self, name: str) -> torch.Tensor:
        return self.shards[name]

    def trained(self, name: str) -> torch.Tensor:
        return self.shards[name]

    def gradient(self, name: str) -> torch.Tensor | None:
        return self.shards[name].grad
