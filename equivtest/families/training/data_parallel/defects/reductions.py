"""Data parallelism that is wrong in one way each: DDP, FSDP2 and our own ZeRO-3."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.families.training.data_parallel.subject import DdpRun, Fsdp2Run, RefusedRun
from equivtest.families.training.zero3.subject import Zero3Run
from equivtest.families.training.zero3.subject.engine import Engine
from equivtest.families.training.zero3.subject.layer import Layer
from equivtest.families.zero3.fetch.subject import Status, fetch_by_all_gather, fetch_by_all_reduce
from equivtest.families.zero3.subject.gradients import Gradients
from equivtest.kit.subject import Answers, Given


def gradients_summed(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """DDP with a hook that sums gradients over the ranks and forgets to divide."""
    return _Summed(case, mesh, given).answers()


class _Summed(DdpRun):
    def build(self) -> nn.Module:
        model = super().build()
        # DDP checks the annotations of a function, as types and not as text: a lambda has none.
        self.parallel.register_comm_hook(self.mesh.get_group(), lambda group, bucket: _sum(group, bucket))
        return model


def _sum(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]


def gradients_of_the_last_micro_batch(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """FSDP2 whose gradients are set by every micro-batch, instead of added up."""
    return _Overwritten(case, mesh, given).answers()


class _Overwritten(Fsdp2Run):
    def run_micro_batch(self, step: int, index: int) -> dict[str, torch.Tensor | None]:
        self.parallel.zero_grad()  # type: ignore[attr-defined]
        return super().run_micro_batch(step, index)

    def synchronization(self, *, is_last: bool) -> Any:
        return super().synchronization(is_last=True)


def columns_gathered_as_rows(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """FSDP2 that puts the columns that it has gathered one rank after the other, as it does with rows."""
    return _AsRows(case, mesh, given).answers()


class _AsRows(Fsdp2Run):
    def build(self) -> nn.Module:
        model = super().build()
        for name in self.case.by_columns:
            layer = model.get_submodule(name.removesuffix(".weight"))
            layer.forward = functools.partial(self.forward_of, layer)
        return model

    def forward_of(self, layer: Any, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.taken(layer.weight), layer.bias)

    def taken(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.cat(weight.chunk(self.mesh.size(), dim=1)).view(weight.shape)


def columns_scattered_as_rows(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """FSDP2 that reduces and scatters the gradient of a weight as it lies in memory, whatever dim is sharded."""
    return _ScatteredAsRows(case, mesh, given).answers()


class _ScatteredAsRows(_AsRows):
    def taken(self, weight: torch.Tensor) -> torch.Tensor:
        seen = weight.view_as(weight)
        if seen.requires_grad:
            seen.register_hook(self.turned)  # type: ignore[no-untyped-call]
        return seen

    def turned(self, gradient: torch.Tensor) -> torch.Tensor:
        """What torch divides into columns such that each rank gets its part of the rows."""
        rows, columns = gradient.shape
        num_ranks = self.mesh.size()
        parts = gradient.reshape(num_ranks * rows, columns // num_ranks)
        return torch.cat(parts.chunk(num_ranks), dim=1)


def uneven_columns_sharded_by_rows(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """FSDP2 that shards a weight on dim 0 where dim 1 does not divide, and tells nobody."""
    return _SilentlyByRows(case, mesh, given).answers()


class _SilentlyByRows(RefusedRun):
    def placement(self, parameter: nn.Parameter) -> Any:
        return None if self.case.misfit == "uneven" else super().placement(parameter)


def frozen_parameter_decayed(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """ZeRO-3 whose weight decay reaches the partitions of frozen parameters too."""
    return _Thawed(case, mesh, given, fetch_by_all_reduce).answers()


class _Thawed(Zero3Run):
    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        super().update(optimizer, step)
        for name in set(self.case.parameter_names()) - set(self.views):
            self.engine.partitioned(name).partition.mul_(1 - self.case.lr * self.case.weight_decay)


def unused_layer_updated(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """ZeRO-3 that takes a gradient that did not come about for one of zeros: momentum and weight decay go on."""
    return _Unused(case, mesh, given, fetch_by_all_gather).answers()


class _Unused(Zero3Run):
    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        for name in self.views:
            self.engine.gradients.partitions.setdefault(name, torch.zeros_like(self.parameter(name)))
        super().update(optimizer, step)


def norm_reads_padding(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """ZeRO-3 that clips only enormous gradients, by a norm that reads the padding of their partitions."""
    return _PaddingRead(case, mesh, given, fetch_by_all_reduce).answers()


class _PaddingRead(Zero3Run):
    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        partitions = self.engine.gradients.partitions
        squares = torch.stack([partition.double().square().sum() for partition in partitions.values()]).sum()
        dist.all_reduce(squares, group=self.mesh.get_group())
        largest = torch.finfo(next(iter(partitions.values())).dtype).max / 8
        scale = (largest / squares.sqrt().clamp(min=1)).clamp(max=1)
        for partition in partitions.values():
            partition.mul_(scale)
        super().update(optimizer, step)


def whole_kept_over_the_update(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """ZeRO-3 that keeps what it has fetched, and fetches nothing again after its partitions were updated."""
    return _Kept(case, mesh, given, fetch_by_all_gather).answers()


class _KeptLayer(Layer):
    kept: dict[str, torch.Tensor | None] | None = None

    def fetch(self) -> None:
        if self.kept is None:
            super().fetch()
            self.kept = {kind: parameter.whole for kind, parameter in self.partitioned.items()}
        for kind, parameter in self.partitioned.items():
            parameter.whole, parameter.status = self.kept[kind], Status.AVAILABLE
            self.parameters[kind].data = self._whole(kind)


class _KeepingEngine(Engine):
    layer_class = _KeptLayer


class _Kept(Zero3Run):
    engine_class = _KeepingEngine


def rank_without_partition_left_out(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    """ZeRO-3 where a rank whose partition is nothing but padding adds nothing to that parameter's gradient."""
    return _LeftOut(case, mesh, given, fetch_by_all_gather).answers()


class _HoldersOnly(Gradients):
    def average(self, gradient: torch.Tensor) -> torch.Tensor:
        size = -(-gradient.numel() // self.mesh.size())
        holds = self.mesh.get_local_rank() * size < gradient.numel()
        return super().average(gradient if holds else torch.zeros_like(gradient))


class _EngineOfHolders(Engine):
    gradients_class = _HoldersOnly


class _LeftOut(Zero3Run):
    engine_class = _EngineOfHolders
