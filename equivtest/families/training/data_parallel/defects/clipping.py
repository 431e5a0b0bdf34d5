"""Clipping by the norm of all gradients that is wrong in one way each."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.families.training.data_parallel.subject import DdpRun
from equivtest.families.training.two_axes.case import TwoAxisCase
from equivtest.families.training.two_axes.subject import HsdpRun
from equivtest.families.training.zero3.subject import Zero3Run
from equivtest.families.training.zero3.subject.clipping import scale
from equivtest.families.zero3.fetch.subject import all_gather, fetch_by_all_gather, fetch_by_all_reduce
from equivtest.kit.subject import Answers, Given


def clipped_by_local_norm(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """ZeRO-3 that clips each rank's partitions by their own norm."""
    return _Local(case, mesh, given, fetch_by_all_gather).answers()


class _Local(Zero3Run):
    def global_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        elements = torch.cat([*gradients, gradients[0].new_zeros(1)])
        norm: torch.Tensor = torch.linalg.vector_norm(elements, float(self.case.norm_type))
        return norm


def clipped_without_root(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """ZeRO-3 that divides by the sum of squares, whose root it answers."""
    return _Rootless(case, mesh, given, fetch_by_all_reduce).answers()


class _Rootless(Zero3Run):
    def clip(self) -> torch.Tensor:
        gradients = [view.grad for view in self.views.values() if view.grad is not None]
        norm = self.global_norm(gradients)
        power = 1.0 if self.case.norm_type == "inf" else float(self.case.norm_type)
        scale(gradients, norm.pow(power), self.case.clip_norm)
        return norm


def clipped_after_the_update(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """DDP whose gradients are clipped once they have been used."""
    return _TooLate(case, mesh, given).answers()


class _TooLate(DdpRun):
    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.step()
        self.keep_clipped(step)


def scaled_up_to_the_norm(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """DDP that scales gradients to the norm that they must not exceed, smaller ones too."""
    return _ScaledUp(case, mesh, given).answers()


class _ScaledUp(DdpRun):
    def clip(self) -> torch.Tensor:
        gradients = [self.model.get_parameter(name).grad for name in self.case.trained_names()]
        present = [gradient for gradient in gradients if gradient is not None]
        norm = nn.utils.get_total_norm(present, float(self.case.norm_type))
        for gradient in present:
            gradient.mul_(self.case.clip_norm / (norm + 1e-6))
        return norm


def replicas_counted_in_the_norm(case: TwoAxisCase, mesh: DeviceMesh, given: Given) -> Answers:
    """HSDP whose norm adds what every rank holds, replicas of a shard once per rank."""
    return _Replicas(case, mesh, given).answers()


class _Replicas(HsdpRun):
    def clip(self) -> torch.Tensor:
        gradients = [self.gradient(name) for name in self.case.trained_names()]
        held = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
        elements, p = torch.cat([local.reshape(-1) for local in held]).double(), float(self.case.norm_type)
        norms = elements.new_empty(self.case.world_size)
        all_gather(norms, torch.linalg.vector_norm(torch.cat([elements, elements.new_zeros(1)]), p).reshape(1))
        norm: torch.Tensor = torch.linalg.vector_norm(norms, p).to(held[0].dtype)
        scale(held, norm, self.case.clip_norm)
        return norm
