# mypy: disable-error-code="no-untyped-call, no-any-return, operator, attr-defined"
"""Programs of torch alone, one for each rule of `BLIND_FOURTH`: `python -m tests.planted.bare.blind_training_4`.

It runs each program with its rule and without it, and prints both answers. It fails if they are equal on all ranks, or
if the answer without the rule differs from `RIGHT`. Names of rules as arguments choose some of them.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed._functional_collectives import all_gather_single
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.nn.functional import broadcast
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.planted.bare.blind_training import linear, whole
from tests.planted.bare.blind_training_2 import Times, sum_of_errors
from tests.planted.bare.blind_training_3 import CPU, NUM_RANKS, both_ranks, exact, of_both
from tests.planted.bare.training import show
from tests.planted.training import BLIND_FOURTH

# FSDP2 and replicate


def output_as_it_comes() -> Tensor:
    model = exact(nn.Linear(2, 2, bias=False))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    return model(torch.tensor([[1.0, 0.0]])).float().detach()


def hook_of_replicas_not_run() -> Tensor:
    model = linear(1, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (NUM_RANKS, 1), mesh_dim_names=("replicas", "shards")))
    model.set_all_reduce_hook(lambda grads: grads.mul_(2))
    model(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()
    return whole(model.weight.grad)


def ignored_parameters_averaged() -> Tensor:
    model = linear(1, 2, bias=True)
    replicate(model, ignored_params={model.bias})
    (model(torch.ones(1, 1)) * (1.0 + dist.get_rank())).sum().backward()
    return of_both(whole(model.bias.grad).square())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return (self.weight * x * scale).square()


def recomputed_without_keywords() -> Tensor:
    model = Scaled()
    checkpoint(model)
    fully_shard(model)
    model(torch.full((2,), 3.0), scale=2.0).sum().backward()
    return whole(model.weight.grad)


# clipping


def replicas_not_clipped() -> Tensor:
    model = linear(2, 1, bias=True)
    parallelize_module(model, both_ranks(), RowwiseParallel(input_layouts=Replicate()))
    model(torch.full((1, 2), 2.0)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return whole(model.bias.grad)


# hooks of DistributedDataParallel


def local_steps_begin_late() -> Tensor:
    model = DistributedDataParallel(linear(1, 1))
    alone, _ = dist.new_subgroups(group_size=1)
    model.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=1), post_localSGD_hook)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()
    return of_both(model.module.weight.grad.square())


# pipelines of one stage


def one_stage(module: nn.Module) -> PipelineStage:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "pp"))
    return PipelineStage(module, 0, 1, CPU, group=mesh.get_group("pp"))


def reduced_after_the_first() -> Tensor:
    module = Times(2.0)
    schedule = ScheduleGPipe(one_stage(DistributedDataParallel(module)), 2, sum_of_errors)
    x = torch.tensor([[1.0], [2.0]]) + 2 * dist.get_rank()
    schedule.step(x, target=torch.zeros_like(x))
    return whole(module.weight.grad)


class Weighted(nn.Module):
    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return x * weights.sum()


def keywords_cut_along_rows() -> Tensor:
    spec = {"weights": TensorChunkSpec(1)}
    schedule = ScheduleGPipe(one_stage(Weighted()), 2, kwargs_chunk_spec=spec)
    return schedule.step(torch.ones(2, 1), weights=torch.tensor([[1.0, 2.0], [3.0, 4.0]])).detach()


def losses_of_all_steps() -> Tensor:
    schedule = ScheduleGPipe(one_stage(Times(2.0)), 2, sum_of_errors)
    losses: list[Tensor] = []
    for _ in range(2):
        schedule.step(torch.ones(2, 1), target=torch.zeros(2, 1), losses=losses)
    return torch.tensor(len(losses))


# ZeroRedundancyOptimizer and state


def numbered_by_each_rank() -> Tensor:
    params = [nn.Parameter(torch.zeros(size)) for size in (3, 2, 1)]
    run = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=1.0, momentum=0.5)
    for param in params:
        param.grad = torch.ones_like(param)
    run.step()
    sizes = torch.zeros(3)
    run.consolidate_state_dict()
    if dist.get_rank() == 0:
        for index, state in run.state_dict()["state"].items():
            sizes[index] = state["momentum_buffer"].numel()
    return of_both(sizes)


def rows_by_own_size() -> Tensor:
    model = linear(1, 3)
    fully_shard(model)
    state: dict[str, Any] = {"weight": torch.tensor([[5.0], [6.0], [7.0]])} if dist.get_rank() == 0 else {}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return whole(model.weight)


def last_row_not_read() -> Tensor:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    rows = distribute_tensor(torch.tensor([[1.0], [2.0], [3.0]]), both_ranks(), [Shard(0)])
    dcp.save({"rows": rows}, checkpoint_id=folder[0])
    state = {"rows": torch.zeros(3, 1)}
    dcp.load(state, checkpoint_id=folder[0])
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    return state["rows"]


# differentiable collectives


def gradient_of_the_source() -> Tensor:
    x = torch.ones(1, requires_grad=True)
    ((1.0 + dist.get_rank()) * broadcast(x, 0)).sum().backward()
    return of_both(whole(x.grad))


def gathered_gradients_averaged() -> Tensor:
    x = torch.ones(1, requires_grad=True)
    ((1.0 + dist.get_rank()) * all_gather_single(x, 0, dist.group.WORLD)).sum().backward()
    return whole(x.grad)


RIGHT: dict[str, Any] = {
    "output_as_it_comes": [[1.0, 1.0]],
    "hook_of_replicas_not_run": [[3.0], [3.0]],
    "ignored_parameters_averaged": [5.0, 5.0],
    "recomputed_without_keywords": [72.0, 72.0],
    "replicas_not_clipped": [1 / 3],
    "local_steps_begin_late": [[5.0]],
    "reduced_after_the_first": [[2.5]],
    "keywords_cut_along_rows": [[4.0], [6.0]],
    "losses_of_all_steps": 2,
    "numbered_by_each_rank": [3.0, 2.0, 1.0],
    "rows_by_own_size": [[5.0], [6.0], [7.0]],
    "last_row_not_read": [[1.0], [2.0], [3.0]],
    "gradient_of_the_source": [3.0],
    "gathered_gradients_averaged": [3.0],
}
"""Answers worked out by hand, the same on all ranks."""


if __name__ == "__main__":
    show(__spec__.name, BLIND_FOURTH)
