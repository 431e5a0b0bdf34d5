# mypy: disable-error-code="no-untyped-call, no-any-return, operator, attr-defined"
"""Programs of torch alone, one for each rule of `BLIND_FIFTH`: `python -m tests.planted.bare.blind_training_5`.

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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils

from tests.planted.bare.blind_training import linear, whole
from tests.planted.bare.blind_training_2 import Times, stepped, sum_of_errors
from tests.planted.bare.blind_training_3 import CPU, NUM_RANKS, both_ranks, of_both
from tests.planted.bare.training import show
from tests.planted.training import BLIND_FIFTH


def own_row() -> Tensor:
    return torch.full((1, 1), 1.0 + dist.get_rank())


# FSDP2 and accumulation of gradients


def frozen_weights_train() -> Tensor:
    model = linear(1, 2, bias=True)
    model.weight.requires_grad_(requires_grad=False)
    fully_shard(model)
    run = torch.optim.SGD(model.parameters(), lr=1.0)
    model(own_row()).sum().backward()
    run.step()
    return whole(model.weight)


def last_of_waiting_gradients() -> Tensor:
    model = linear(1, 2)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    for is_last in (False, False, True):
        model.set_requires_gradient_sync(is_last)
        model(own_row()).sum().backward()
    return whole(model.weight.grad)


def reduced_gradient_replaces() -> Tensor:
    model = linear(1, 2)
    fully_shard(model)
    for _ in range(2):
        model(own_row()).sum().backward()
    return whole(model.weight.grad)


# DistributedDataParallel and its hooks


def never_reduced_again() -> Tensor:
    model = DistributedDataParallel(linear(1, 1))
    with model.no_sync():
        model(own_row()).sum().backward()
    model(own_row()).sum().backward()
    return of_both(model.module.weight.grad.square())


def hook_over_the_world() -> Tensor:
    model = DistributedDataParallel(linear(1, 1))
    alone, _ = dist.new_subgroups(group_size=1)
    model.register_comm_hook(alone, allreduce_hook)
    model(own_row()).sum().backward()
    return of_both(model.module.weight.grad.square())


# tensor parallel


def columns_for_rows() -> Tensor:
    layer = parallelize_module(linear(2, 2), both_ranks(), ColwiseParallel(output_layouts=Shard(0)))
    rows = layer(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).detach()
    parts = [torch.zeros_like(rows) for _ in range(NUM_RANKS)]
    dist.all_gather(parts, rows)
    return torch.cat(parts)


def columns_of_each_rank() -> Tensor:
    layer = nn.Linear(1, 2, bias=False)
    nn.init.constant_(layer.weight, 1.0 + dist.get_rank())
    divided: Any = parallelize_module(layer, both_ranks(), ColwiseParallel())
    return whole(divided.weight)


# optimizers and averages


def decayed_once_for_each_dtype() -> Tensor:
    params = [nn.Parameter(torch.ones(1, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    for param in params:
        param.grad = torch.zeros_like(param)
    torch.optim.AdamW(params, lr=0.5, weight_decay=0.5, foreach=True).step()
    return torch.cat([param.detach().float() for param in params])


def newest_model_decays() -> Tensor:
    model = linear(1, 1)
    mean = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.75))
    for value in (4.0, 8.0):
        nn.init.constant_(model.weight, value)
        mean.update_parameters(model)
    return mean.module.weight.detach()


# clipping and the scaler


def clipped_copies() -> Tensor:
    model = linear(1, 2)
    fully_shard(model)
    model(torch.full((1, 1), 3.0)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 2**0.5, foreach=False)
    return whole(model.weight.grad)


def unscaled_in_one_dtype() -> Tensor:
    params = [nn.Parameter(torch.zeros(1, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    run, scaler = torch.optim.SGD(params, lr=1.0), torch.amp.GradScaler("cpu", init_scale=4.0)
    loss: Any = sum(param.float().sum() for param in params)
    scaler.scale(loss).backward()
    scaler.step(run)
    return torch.cat([param.detach().float() for param in params])


# pipelines


def last_micro_batch_weighs() -> Tensor:
    return gradients_of_stages(1.0)


def gradients_of_stages(weight: float) -> Tensor:
    """Returns the gradients of four stages with this weight after a step with a split backward."""
    rank = dist.get_rank()
    modules = {index: Times(weight) for index in (rank, rank + 2)}
    stages: list[Any] = [PipelineStage(module, index, 4, CPU) for index, module in modules.items()]
    stepped(ScheduleInterleavedZeroBubble(stages, 4, sum_of_errors, scale_grads=False), torch.ones(4, 1))
    grads = torch.zeros(4)
    for index, module in modules.items():
        grads[index] = whole(module.weight.grad)
    return of_both(grads)


# checkpoints


def shared_folder() -> str:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    return folder[0]


def staged_without_a_copy() -> Tensor:
    model, folder = linear(1, 2), shared_folder()
    saved: Any = dcp.async_save(model.state_dict(), checkpoint_id=folder)
    nn.init.constant_(model.weight, 7.0)  # the next step
    saved.result()
    dist.barrier()
    state = {"weight": torch.zeros(2, 1)}
    dcp.load(state, checkpoint_id=folder)
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return state["weight"]


def states_read_but_not_loaded() -> Tensor:
    folder, runs = shared_folder(), []
    for rate in (0.5, 0.25):
        run = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        runs.append((torch.optim.lr_scheduler.ExponentialLR(run, gamma=rate), run))
    for _ in range(3):
        runs[0][1].step()
        runs[0][0].step()
    dcp.save({"schedule": runs[0][0]}, checkpoint_id=folder)
    dcp.load({"schedule": runs[1][0]}, checkpoint_id=folder)
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return torch.tensor([runs[1][0].last_epoch, runs[1][0].gamma])


# differentiable collectives


def own_gradient_of_a_sum() -> Tensor:
    x = torch.ones(1, requires_grad=True)
    ((1.0 + dist.get_rank()) * all_reduce(x)).sum().backward()
    return whole(x.grad)


RIGHT: dict[str, Any] = {
    "frozen_weights_train": [[0.0], [1.0]],
    "last_of_waiting_gradients": [[4.5], [4.5]],
    "reduced_gradient_replaces": [[3.0], [3.0]],
    "never_reduced_again": [[18.0]],
    "hook_over_the_world": [[5.0]],
    "columns_for_rows": [[0.0, 2.0], [1.0, 3.0]],
    "columns_of_each_rank": [[1.0], [1.0]],
    "decayed_once_for_each_dtype": [0.75, 0.75],
    "newest_model_decays": [[5.0]],
    "clipped_copies": [[1.0], [1.0]],
    "unscaled_in_one_dtype": [-1.0, -1.0],
    "last_micro_batch_weighs": [4.0] * 4,
    "staged_without_a_copy": [[0.0], [1.0]],
    "states_read_but_not_loaded": [3.0, 0.5],
    "own_gradient_of_a_sum": [3.0],
}
"""Answers worked out by hand, the same on all ranks."""


if __name__ == "__main__":
    show(__spec__.name, BLIND_FIFTH)
