"""Subjects that train a perceptron under the project's own ZeRO-3. torch's optimizers update the partitions.

An optimizer sees each partition without its padding, as a view of the partition's memory.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.subject import Answers, Given
from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.families.training.data_parallel.subject import DataParallelRun
from equivtest.families.training.subject import Mlp
from equivtest.families.training.zero3.subject.clipping import global_norm, scale
from equivtest.families.training.zero3.subject.engine import Engine
from equivtest.families.zero3.fetch.subject import Fetcher, fetch_by_all_gather, fetch_by_all_reduce
from equivtest.tensors import DTYPES


def zero3_mlp_all_gather(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    return Zero3Run(case, mesh, given, fetch_by_all_gather).answers()


def zero3_mlp_all_reduce(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    return Zero3Run(case, mesh, given, fetch_by_all_reduce).answers()


class Zero3Run(DataParallelRun):
    engine_class: ClassVar[type[Engine]] = Engine

    def __init__(self, case: DataParallelCase, mesh: DeviceMesh, given: Given, fetcher: Fetcher) -> None:
        self.fetcher = fetcher
        self.padding = float("nan") if case.padding == "nan" else torch.finfo(DTYPES[case.dtype]).max / 4
        super().__init__(case, mesh, given)
        self.views = {name: nn.Parameter(self.held(name, self.parameter(name))) for name in case.trained_names()}

    def build(self) -> nn.Module:
        model = Mlp(self.case, self.given)
        model.wrap()
        self.engine = self.engine_class(model, self.mesh, self.fetcher, padding=self.padding)
        return model

    def held(self, name: str, partition: torch.Tensor) -> torch.Tensor:
        """Returns a view of `partition`, this rank's part of a parameter, without its padding."""
        start = self.mesh.get_local_rank() * partition.numel()
        numel = self.engine.partitioned(name).numel
        return partition.detach()[: max(0, min(partition.numel(), numel - start))]

    def padded(self, name: str, held: torch.Tensor) -> torch.Tensor:
        partition = torch.full_like(self.parameter(name), self.padding, requires_grad=False)
        partition[: held.numel()] = held
        return partition

    def parameter(self, name: str) -> torch.Tensor:
        partitioned = self.engine.partitioned(name)
        return partitioned.partition.detach().requires_grad_(partitioned.requires_grad)

    def trained(self, name: str) -> torch.Tensor:
        return self.views[name]

    def backward(self, output: torch.Tensor, cotangent: torch.Tensor) -> None:
        self.engine.backward(output, cotangent)

    def gradient(self, name: str) -> torch.Tensor | None:
        return self.engine.gradients.partitions.get(name)

    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Raises RuntimeError if a layer is still whole, because a whole layer would keep the old values."""
        for name, layer in self.engine.layers.items():
            if layer.is_available:
                raise RuntimeError(f"{name} is AVAILABLE; release it before the update of its partitions")
        for name, view in self.views.items():
            partition = self.engine.gradients.partitions.get(name)
            view.grad = None if partition is None else self.held(name, partition)
        super().update(optimizer, step)
        self.engine.gradients.clear()

    def clip(self) -> torch.Tensor:
        gradients = [view.grad for view in self.views.values() if view.grad is not None]
        norm = self.global_norm(gradients)
        scale(gradients, norm, self.case.clip_norm)
        return norm

    def global_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return global_norm(gradients, float(self.case.norm_type), self.mesh)

    def state_held(self, optimizer: torch.optim.Optimizer, state: str, name: str) -> torch.Tensor | None:
        if state == "param":
            return self.parameter(name)
        found = super().state_held(optimizer, state, name)
        return None if found is None else self.padded(name, found)
