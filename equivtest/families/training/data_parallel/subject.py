"""Subjects that train a perceptron by torch's DDP and FSDP2 and torch's optimizers.

Every rank runs its own rows, micro-batch after micro-batch. Gradients are averaged over the ranks.

Source: torch/nn/parallel/distributed.py and torch/distributed/fsdp/_fully_shard (2.13.0).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from equivtest.cases.case import at_step
from equivtest.cases.subject import Answers, Given
from equivtest.families.training.case import LAYERS
from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.families.training.data_parallel.case_refused import RefusedShardingCase
from equivtest.families.training.subject import Mlp, PerceptronRun

TINY_BUCKET_MIB = 1e-6
"""Bucket size in MiB, about one byte, so that every gradient fills a bucket alone."""


def ddp_mlp(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    return DdpRun(case, mesh, given).answers()


def fsdp2_mlp(case: DataParallelCase, mesh: DeviceMesh, given: Given) -> Answers:
    run = RefusedRun if isinstance(case, RefusedShardingCase) else Fsdp2Run
    return run(case, mesh, given).answers()


class DataParallelRun(PerceptronRun):
    """Runs several micro-batches per step. An answer for an output or a capture concatenates all micro-batches."""

    case: DataParallelCase

    def run_step(self, step: int) -> None:
        parts = [self.run_micro_batch(step, index) for index in range(self.case.micro_batches)]
        for name in parts[0]:
            found = [part[name] for part in parts]
            whole = torch.cat([tensor for tensor in found if tensor is not None]) if None not in found else None
            self.keep(at_step(step, name), whole)
        for name in self.case.graded_parameters(step):
            self.keep(at_step(step, f"grad.{name}"), self.gradient(name))

    def run_micro_batch(self, step: int, index: int) -> dict[str, torch.Tensor | None]:
        case, rows = self.case, slice(index * self.case.leading[0], (index + 1) * self.case.leading[0])
        x = self.given[at_step(step, "x")].detach()[rows].requires_grad_("x" in case.requires_grad)
        with self.synchronization(is_last=index == case.micro_batches - 1):
            output = self.forward(x)
            self.backward(output, self.given[at_step(step, "cotangent")][rows])
        found: dict[str, torch.Tensor | None] = {"output": output}
        found |= {name: self.captured.pop(name, None) for name in case.captured_names(step)}
        return found | ({"grad.x": x.grad} if "x" in case.graded_names(step) else {})

    def backward(self, output: torch.Tensor, cotangent: torch.Tensor) -> None:
        torch.autograd.backward(output, cotangent)

    def synchronization(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Returns a context for one micro-batch. Only a step's last backward must reduce gradients."""
        return nullcontext()


class DdpRun(DataParallelRun):
    def build(self) -> nn.Module:
        return self.replicate(Mlp(self.case, self.given), self.mesh)

    def replicate(self, model: Mlp, mesh: DeviceMesh) -> nn.Module:
        case = self.case
        model.wrap()
        how: dict[str, Any] = {
            "bucket_cap_mb": TINY_BUCKET_MIB if case.small_buckets else None,
            "gradient_as_bucket_view": case.views,
            "find_unused_parameters": bool(case.stopped_steps),
        }
        if case.wrapper == "composable":
            self.parallel: Any = replicate(model, device_mesh=mesh, **how)
        else:
            place: dict[str, Any] = (
                {"device_mesh": mesh} if case.wrapper == "mesh" else {"process_group": mesh.get_group()}
            )
            self.parallel = DistributedDataParallel(model, **place, **how)
        return model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.parallel(x)
        return output

    def synchronization(self, *, is_last: bool) -> AbstractContextManager[None]:
        if self.case.wrapper == "composable":
            self.parallel.set_requires_gradient_sync(is_last)
            return nullcontext()
        return nullcontext() if is_last else cast("AbstractContextManager[None]", self.parallel.no_sync())


class Fsdp2Run(DataParallelRun):
    def build(self) -> nn.Module:
        return self.shard(Mlp(self.case, self.given), self.mesh)

    def shard(self, model: Mlp, mesh: DeviceMesh) -> nn.Module:
        """Applies `fully_shard` to the layers, then to the model. Tied layers share one group of parameters."""
        model.wrap()
        self.by_columns = [model.get_parameter(name) for name in self.case.by_columns]
        layers = [model.get_submodule(layer) for layer in LAYERS]
        for group in [layers] if self.case.tied else [[layer] for layer in layers]:
            self.shard_together(group, mesh)
        self.parallel = self.shard_together(model, mesh)
        return model

    @property
    def reshards_at_first(self) -> bool:
        return self.case.reshards

    def shard_together(self, modules: Any, mesh: DeviceMesh) -> FSDPModule:
        sharded: FSDPModule = fully_shard(
            modules,
            mesh=mesh,
            reshard_after_forward=self.reshards_at_first,
            shard_placement_fn=self.placement,
            mp_policy=self.policy(),
        )
        return sharded

    def load_state(self, saved: torch.optim.Optimizer, loading: torch.optim.Optimizer) -> None:
        """Loads the state by the names of parameters, as torch.distributed.checkpoint does."""
        saved.zero_grad()  # torch makes no state for parameters with gradients
        set_optimizer_state_dict(self.model, loading, get_optimizer_state_dict(self.model, saved))

    def placement(self, parameter: nn.Parameter) -> Any:
        """Returns the placement of a parameter. None stands for FSDP2's default, which shards dim 0."""
        return Shard(1) if any(parameter is each for each in self.by_columns) else None

    def policy(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy()

    def synchronization(self, *, is_last: bool) -> AbstractContextManager[None]:
        self.parallel.set_requires_gradient_sync(is_last or self.case.syncs_every)
        return nullcontext()


class RefusedRun(Fsdp2Run):
    case: RefusedShardingCase

    def shard(self, model: Mlp, mesh: DeviceMesh) -> nn.Module:
        self.first = model.get_parameter("in_proj.weight")
        if self.case.misfit == "not_contiguous":
            self.first.data = self.first.data.t().contiguous().t()
        return super().shard(model, mesh)

    def placement(self, parameter: nn.Parameter) -> Any:
        asked = {"dim": Shard(2), "placement": Replicate(), "uneven": Shard(1)}
        return asked.get(self.case.misfit) if parameter is self.first else None
