"""Data parallelism that is wrong in one way each where two layers have one weight."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.families.training.data_parallel.subject import DdpRun, Fsdp2Run
from equivtest.families.training.zero3.subject import Zero3Run
from equivtest.families.training.zero3.subject.engine import Engine
from equivtest.families.training.zero3.subject.layer import Layer
from equivtest.families.zero3.fetch.subject import PartitionedParameter, fetch_by_all_gather, fetch_by_all_reduce
from equivtest.kit.subject import Answers, Given


def gradient_of_the_second_use_lost(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """DDP whose second layer uses the tied weight beside the graph."""
    return _OneUse(case, mesh, given).answers()


class _OneUse(DdpRun):
    def build(self) -> nn.Module:
        model = super().build()
        if self.case.tied:
            out_proj = model.get_submodule("out_proj")
            assert isinstance(out_proj, nn.Linear)

            def forward(input: torch.Tensor) -> torch.Tensor:
                weight = out_proj.weight.detach()
                return functional.linear(input, weight.t() if self.case.tied == "transposed" else weight, out_proj.bias)

            out_proj.forward = forward  # type: ignore[method-assign]
        return model


def updated_once_per_place(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """FSDP2 whose optimizer is given a tied weight for each of its places."""
    return _TwiceUpdated(case, mesh, given).answers()


class _TwiceUpdated(Fsdp2Run):
    def updated(self) -> list[torch.Tensor]:
        names = self.case.trained_names()
        second = ["out_proj.weight"] if self.case.tied and "in_proj.weight" in names else []
        return [self.trained(name) for name in (*names, *second)]


def partitioned_once_per_place(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """ZeRO-3 that keeps a partition of a tied weight for each of its places, and updates the first."""
    return _Apart(case, mesh, given, fetch_by_all_gather).answers()


class _OwnPartitions(Layer):
    def __init__(
        self, *args: object, partitions: dict[nn.Parameter, PartitionedParameter] | None = None, padding: float
    ) -> None:
        super().__init__(*args, padding=padding, partitions=partitions)  # type: ignore[arg-type]
        self.partitioned = {
            kind: replace(shared, partition=shared.partition.clone()) for kind, shared in self.partitioned.items()
        }


class _EngineOfOwnPartitions(Engine):
    layer_class = _OwnPartitions


class _Apart(Zero3Run):
    engine_class = _EngineOfOwnPartitions


def copied_once_per_place(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The same, but that every update is copied to the second partition: right, in twice the memory."""
    return _Copied(case, mesh, given, fetch_by_all_reduce).answers()


class _Copied(_Apart):
    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        super().update(optimizer, step)
        if self.case.tied:
            self.engine.partitioned("out_proj.weight").partition.copy_(
                self.engine.partitioned("in_proj.weight").partition
            )


def fetched_once_per_place(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """ZeRO-3 that releases a tied weight after each layer, though the next one has it too."""
    return _Again(case, mesh, given, fetch_by_all_gather).answers()


class _Forgetful(Engine):
    def __init__(self, *args: object, padding: float) -> None:
        super().__init__(*args, padding=padding)  # type: ignore[arg-type]
        for layer in self.layers.values():
            layer.earlier = layer.later = frozenset()


class _Again(Zero3Run):
    engine_class = _Forgetful
