"""Data parallelism that is wrong in one way each: DDP, FSDP2 and our own ZeRO-3."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.families.training.data_parallel.case_refused import RefusedShardingCase
from equivtest.families.training.data_parallel.subject import DdpRun, Fsdp2Run, RefusedRun
from equivtest.families.training.zero3.subject import Zero3Run
from equivtest.families.training.zero3.subject.engine import Engine
from equivtest.families.training.zero3.subject.layer import Layer
from equivtest.families.zero3.fetch.subject import Status, fetch_by_all_gather, fetch_by_all_reduce
from equivtest.families.zero3.subject.gradients import Gradients
from tests.defects.defect import Replacing, answers_of

wrong_ddp = Replacing("ddp_mlp")
wrong_fsdp2 = Replacing("fsdp2_mlp")
wrong_zero3_all_reduce = Replacing("zero3_mlp_all_reduce")
wrong_zero3_all_gather = Replacing("zero3_mlp_all_gather")


class _Summed(DdpRun):
    """DDP with a hook that sums gradients over the ranks and forgets to divide."""

    def build(self) -> nn.Module:
        model = super().build()
        # DDP checks the annotations of a function, as types and not as text: a lambda has none.
        self.parallel.register_comm_hook(self.mesh.get_group(), lambda group, bucket: _sum(group, bucket))
        return model


gradients_summed = wrong_ddp(
    "wrong divisor or wrong group",
    DataParallelCase(world_size=2, biases=("out_proj",), requires_grad=("out_proj.bias",)),
    "one rank's sum is its average; of two it is twice that, and the sum of two cotangents is not zero",
    claim="gradients_equal_unsharded",
)(answers_of(_Summed))


def _sum(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]


class _Overwritten(Fsdp2Run):
    """FSDP2 in which every micro-batch overwrites the gradients instead of adding to them."""

    def run_micro_batch(self, step: int, index: int) -> dict[str, torch.Tensor | None]:
        self.parallel.zero_grad()  # type: ignore[attr-defined]
        return super().run_micro_batch(step, index)

    def synchronization(self, *, is_last: bool) -> Any:
        return super().synchronization(is_last=True)


gradients_of_the_last_micro_batch = wrong_fsdp2(
    "state across calls",
    DataParallelCase(
        world_size=1, style="fsdp2", biases=("out_proj",), requires_grad=("out_proj.bias",), micro_batches=2
    ),
    "two micro-batches are needed, one rank suffices; no cotangent is zero",
    claim="gradients_equal_unsharded",
)(answers_of(_Overwritten))


class _AsRows(Fsdp2Run):
    """FSDP2 that puts gathered columns one rank after the other, like rows."""

    def build(self) -> nn.Module:
        model = super().build()
        for name in self.case.by_columns:
            layer = model.get_submodule(name.removesuffix(".weight"))
            layer.forward = functools.partial(self.forward_of, layer)
        return model

    def forward_of(self, layer: Any, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.operand(layer.weight), layer.bias)

    def operand(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.cat(weight.chunk(self.mesh.size(), dim=1)).view(weight.shape)


columns_gathered_as_rows = wrong_fsdp2(
    "another dim",
    DataParallelCase(
        world_size=2,
        style="fsdp2",
        by_columns=("out_proj.weight",),
        hidden_features=2,
        out_features=2,
        requires_grad=("out_proj.weight",),
    ),
    "two ranks have a column each; of a single row all orders are one",
)(answers_of(_AsRows))


class _ScatteredAsRows(_AsRows):
    """FSDP2 that reduces and scatters the gradient of a weight as it lies in memory, whatever dim is sharded."""

    def operand(self, weight: torch.Tensor) -> torch.Tensor:
        seen = weight.view_as(weight)
        if seen.requires_grad:
            seen.register_hook(self.turned)  # type: ignore[no-untyped-call]
        return seen

    def turned(self, gradient: torch.Tensor) -> torch.Tensor:
        """Arranges the gradient so that torch's split into columns gives each rank its part of the rows."""
        rows, columns = gradient.shape
        num_ranks = self.mesh.size()
        parts = gradient.reshape(num_ranks * rows, columns // num_ranks)
        return torch.cat(parts.chunk(num_ranks), dim=1)


columns_scattered_as_rows = wrong_fsdp2(
    "another dim",
    DataParallelCase(
        world_size=2,
        style="fsdp2",
        by_columns=("out_proj.weight",),
        hidden_features=2,
        out_features=2,
        requires_grad=("out_proj.weight",),
    ),
    "as of what is gathered",
    claim="gradients_equal_unsharded",
)(answers_of(_ScatteredAsRows))


class _SilentlyByRows(RefusedRun):
    """FSDP2 that silently shards a weight on dim 0 if dim 1 does not divide."""

    def placement(self, parameter: nn.Parameter) -> Any:
        return None if self.case.misfit == "uneven" else super().placement(parameter)


uneven_columns_sharded_by_rows = wrong_fsdp2(
    "misfits accepted", RefusedShardingCase(world_size=2, misfit="uneven"), "two ranks, one column", claim="refuses"
)(answers_of(_SilentlyByRows))


class _Thawed(Zero3Run):
    """ZeRO-3 that applies weight decay to the partitions of frozen parameters, too."""

    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        super().update(optimizer, step)
        for name in set(self.case.parameter_names()) - set(self.views):
            self.engine.partitioned(name).partition.mul_(1 - self.case.lr * self.case.weight_decay)


frozen_parameter_decayed = wrong_zero3_all_reduce(
    "flags",
    DataParallelCase(
        world_size=1, style="zero3", requires_grad=("out_proj.weight",), optimizer="sgd", steps=2, weight_decay=0.25
    ),
    "one frozen weight of one element; training takes two steps at least",
    claim="trains_like_unsharded",
)(answers_of(_Thawed, fetch_by_all_reduce))


class _Unused(Zero3Run):
    """ZeRO-3 that takes a gradient that did not come about for one of zeros: momentum and weight decay go on."""

    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        for name in self.views:
            self.engine.gradients.partitions.setdefault(name, torch.zeros_like(self.parameter(name)))
        super().update(optimizer, step)


unused_layer_updated = wrong_zero3_all_gather(
    "flags",
    DataParallelCase(
        world_size=1,
        style="zero3",
        requires_grad=("in_proj.weight", "out_proj.weight"),
        optimizer="sgd",
        steps=2,
        weight_decay=0.25,
        stopped_steps=(2,),
    ),
    "one rank; a layer must have been used before it is not, and decays",
    claim="trains_like_unsharded",
)(answers_of(_Unused, fetch_by_all_gather))


class _PaddingRead(Zero3Run):
    """ZeRO-3 that clips only enormous gradients, by a norm that reads the padding of their partitions."""

    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        partitions = self.engine.gradients.partitions
        squares = torch.stack([partition.double().square().sum() for partition in partitions.values()]).sum()
        dist.all_reduce(squares, group=self.mesh.get_group())
        largest = torch.finfo(next(iter(partitions.values())).dtype).max / 8
        scale = (largest / squares.sqrt().clamp(min=1)).clamp(max=1)
        for partition in partitions.values():
            partition.mul_(scale)
        super().update(optimizer, step)


norm_reads_padding = wrong_zero3_all_reduce(
    "uninitialised memory reaches a value",
    DataParallelCase(world_size=2, style="zero3", requires_grad=("out_proj.weight",), optimizer="sgd", steps=2),
    "one rank pads nothing; of two, the second holds only padding of one element",
    claim="trains_like_unsharded",
)(answers_of(_PaddingRead, fetch_by_all_reduce))


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
    """ZeRO-3 that keeps fetched parameters, and does not fetch them again after an update of its partitions."""

    engine_class = _KeepingEngine


whole_kept_over_the_update = wrong_zero3_all_gather(
    "state across steps",
    DataParallelCase(
        world_size=1,
        style="zero3",
        requires_grad=("out_proj.weight",),
        optimizer="sgd",
        steps=2,
        values=(("dense", 1),),
    ),
    "one weight, updated once, shows it from the second step on if the hidden feature is active then",
    claim="trains_like_unsharded",
)(answers_of(_Kept, fetch_by_all_gather))


class _HoldersOnly(Gradients):
    def average(self, gradient: torch.Tensor) -> torch.Tensor:
        size = -(-gradient.numel() // self.mesh.size())
        holds = self.mesh.get_local_rank() * size < gradient.numel()
        return super().average(gradient if holds else torch.zeros_like(gradient))


class _EngineOfHolders(Engine):
    gradients_class = _HoldersOnly


class _LeftOut(Zero3Run):
    """ZeRO-3 in which a rank with only padding in its partition adds nothing to that parameter's gradient."""

    engine_class = _EngineOfHolders


rank_without_partition_left_out = wrong_zero3_all_gather(
    "size not a multiple of the world size",
    DataParallelCase(world_size=2, style="zero3", requires_grad=("out_proj.weight",)),
    "of two ranks the second has an empty shard of one element, and another row",
    claim="gradients_equal_unsharded",
)(answers_of(_LeftOut, fetch_by_all_gather))
