"""Data parallelism of two layers with one weight, wrong in one way each."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional

from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.families.training.data_parallel.subject import DdpRun, Fsdp2Run
from equivtest.families.training.zero3.subject import Zero3Run
from equivtest.families.training.zero3.subject.engine import Engine
from equivtest.families.training.zero3.subject.layer import Layer
from equivtest.families.zero3.fetch.subject import PartitionedParameter, fetch_by_all_gather, fetch_by_all_reduce
from tests.defects.defect import Replacing, answers_of

wrong_ddp = Replacing("ddp_mlp")
wrong_fsdp2 = Replacing("fsdp2_mlp")
wrong_zero3_all_gather = Replacing("zero3_mlp_all_gather")
wrong_zero3_all_reduce = Replacing("zero3_mlp_all_reduce")


def _trained(style: str) -> DataParallelCase:
    return DataParallelCase(
        world_size=1, style=style, tied="same", requires_grad=("in_proj.weight",), optimizer="sgd", steps=2
    )


class _OneUse(DdpRun):
    """DDP in which the second layer uses the tied weight outside the graph."""

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


gradient_of_the_second_use_lost = wrong_ddp(
    "a term missing",
    DataParallelCase(world_size=1, tied="same", requires_grad=("in_proj.weight",)),
    "one weight of one element; no cotangent is zero, and the hidden activation is not",
    claim="gradients_equal_unsharded",
)(answers_of(_OneUse))


class _TwiceUpdated(Fsdp2Run):
    """FSDP2 with a tied weight twice in its optimizer."""

    def updated(self) -> list[torch.Tensor]:
        names = self.case.trained_names()
        second = ["out_proj.weight"] if self.case.tied and "in_proj.weight" in names else []
        return [self.trained(name) for name in (*names, *second)]


updated_once_per_place = wrong_fsdp2(
    "state across steps",
    _trained("fsdp2"),
    "one weight of one element, updated twice from the gradient of one step",
    claim="trains_like_unsharded",
)(answers_of(_TwiceUpdated))


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
    """ZeRO-3 that keeps a partition of a tied weight for each of its places, and updates the first."""

    engine_class = _EngineOfOwnPartitions


partitioned_once_per_place = wrong_zero3_all_gather(
    "a copy left behind",
    _trained("zero3"),
    "one weight of one element: the first update leaves its second place unchanged",
    claim="trains_like_unsharded",
)(answers_of(_Apart, fetch_by_all_gather))


class _Copied(_Apart):
    """The same, except that every update is copied to the second partition: right, in twice the memory."""

    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        super().update(optimizer, step)
        if self.case.tied:
            self.engine.partitioned("out_proj.weight").partition.copy_(
                self.engine.partitioned("in_proj.weight").partition
            )


copied_once_per_place = wrong_zero3_all_reduce(
    "memory kept",
    DataParallelCase(world_size=1, style="zero3", tied="same", requires_grad=("in_proj.weight",)),
    "two storages are two, whatever is in them",
)(answers_of(_Copied, fetch_by_all_reduce))


class _Forgetful(Engine):
    def __init__(self, *args: object, padding: float) -> None:
        super().__init__(*args, padding=padding)  # type: ignore[arg-type]
        for layer in self.layers.values():
            layer.earlier = layer.later = frozenset()


class _Again(Zero3Run):
    """ZeRO-3 that releases a tied weight after each layer, though the next one has it too."""

    engine_class = _Forgetful


fetched_once_per_place = wrong_zero3_all_gather(
    "other collectives than documented",
    DataParallelCase(
        world_size=1, style="zero3", fetch="all_gather", records=True, tied="same", requires_grad=("in_proj.weight",)
    ),
    "one weight, fetched forward and backward, each time once more than needed",
    claim="uses_only_collectives",
)(answers_of(_Again, fetch_by_all_gather))
