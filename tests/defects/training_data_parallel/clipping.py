"""Clipping by the norm of all gradients that is wrong in one way each."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.families.training.data_parallel.subject import DdpRun
from equivtest.families.training.two_axes.case import TwoAxisCase
from equivtest.families.training.two_axes.subject import HsdpRun
from equivtest.families.training.zero3.subject import Zero3Run
from equivtest.families.training.zero3.subject.clipping import scale
from equivtest.families.zero3.fetch.subject import all_gather, fetch_by_all_gather, fetch_by_all_reduce
from tests.defects.defect import Replacing, answers_of

wrong_zero3_all_gather = Replacing("zero3_mlp_all_gather")
wrong_zero3_all_reduce = Replacing("zero3_mlp_all_reduce")
wrong_ddp = Replacing("ddp_mlp")
wrong_hsdp = Replacing("hsdp_mlp")


class _Local(Zero3Run):
    """ZeRO-3 that clips each rank's partitions by the norm of that rank's partitions."""

    def global_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        elements = torch.cat([*gradients, gradients[0].new_zeros(1)])
        norm: torch.Tensor = torch.linalg.vector_norm(elements, float(self.case.norm_type))
        return norm


clipped_by_local_norm = wrong_zero3_all_gather(
    "a partial value taken for the whole",
    DataParallelCase(
        world_size=2, style="zero3", requires_grad=("out_proj.weight",), optimizer="sgd", steps=2, clip_norm=1.0
    ),
    "one rank has the norm of all; of two, the second has an empty shard of one element",
    claim="trains_like_unsharded",
)(answers_of(_Local, fetch_by_all_gather))


class _Rootless(Zero3Run):
    """ZeRO-3 that divides by the sum of squares, and reports its root."""

    def clip(self) -> torch.Tensor:
        gradients = [view.grad for view in self.views.values() if view.grad is not None]
        norm = self.global_norm(gradients)
        power = 1.0 if self.case.norm_type == "inf" else float(self.case.norm_type)
        scale(gradients, norm.pow(power), self.case.clip_norm)
        return norm


clipped_without_root = wrong_zero3_all_reduce(
    "wrong divisor or wrong group",
    DataParallelCase(
        world_size=1, style="zero3", requires_grad=("out_proj.weight",), optimizer="sgd", steps=2, clip_norm=1.0
    ),
    "the gradient of one weight is 4 or more, clipped to 1; its square divides by 16",
    claim="trains_like_unsharded",
)(answers_of(_Rootless, fetch_by_all_reduce))


class _TooLate(DdpRun):
    """DDP that clips gradients after their use."""

    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.step()
        self.keep_clipped(step)


clipped_after_the_update = wrong_ddp(
    "state across steps",
    DataParallelCase(world_size=1, requires_grad=("out_proj.weight",), optimizer="sgd", steps=2, clip_norm=1.0),
    "one rank and one weight whose gradient is more than 1",
    claim="trains_like_unsharded",
)(answers_of(_TooLate))


class _ScaledUp(DdpRun):
    """DDP that scales gradients to the maximal norm, also gradients with a smaller norm."""

    def clip(self) -> torch.Tensor:
        gradients = [self.model.get_parameter(name).grad for name in self.case.trained_names()]
        present = [gradient for gradient in gradients if gradient is not None]
        norm = nn.utils.get_total_norm(present, float(self.case.norm_type))
        for gradient in present:
            gradient.mul_(self.case.clip_norm / (norm + 1e-6))
        return norm


scaled_up_to_the_norm = wrong_ddp(
    "a term missing",
    DataParallelCase(world_size=1, requires_grad=("out_proj.weight",), optimizer="sgd", steps=2, clip_norm=16.0),
    "one rank and one weight whose gradient is less than 16",
    claim="trains_like_unsharded",
)(answers_of(_ScaledUp))


class _Replicas(HsdpRun):
    """HSDP with a norm that counts replicas of a shard once per rank."""

    def clip(self) -> torch.Tensor:
        gradients = [self.gradient(name) for name in self.case.trained_names()]
        held = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
        elements, p = torch.cat([local.reshape(-1) for local in held]).double(), float(self.case.norm_type)
        norms = elements.new_empty(self.case.world_size)
        all_gather(norms, torch.linalg.vector_norm(torch.cat([elements, elements.new_zeros(1)]), p).reshape(1))
        norm: torch.Tensor = torch.linalg.vector_norm(norms, p).to(held[0].dtype)
        scale(held, norm, self.case.clip_norm)
        return norm


replicas_counted_in_the_norm = wrong_hsdp(
    "a partial value taken for the whole",
    TwoAxisCase(
        world_size=4,
        mesh=(2, 2),
        style="hsdp",
        requires_grad=("out_proj.weight",),
        optimizer="sgd",
        steps=2,
        clip_norm=1.0,
    ),
    "a weight of one element that two ranks hold alike; two would do, but such a mesh is seldom drawn",
    claim="trains_like_unsharded",
)(answers_of(_Replicas))
