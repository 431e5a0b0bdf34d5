# mypy: disable-error-code="no-untyped-call, no-any-return, operator, attr-defined"
"""Programs of torch alone, one for each rule of `BLIND_SIXTH`: `python -m tests.planted.bare.blind_training_6`.

It runs each program with its rule and without it, and prints both answers. It fails if they are equal on all ranks, or
if the answer without the rule differs from `RIGHT`. Names of rules as arguments choose some of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from tests.planted.bare.blind_training import linear, whole
from tests.planted.bare.blind_training_2 import Times, stepped, sum_of_errors
from tests.planted.bare.blind_training_3 import CPU, NUM_RANKS, both_ranks, of_both
from tests.planted.bare.blind_training_5 import own_row
from tests.planted.bare.training import show
from tests.planted.training import BLIND_SIXTH

# FSDP2


def tied_weights_part() -> Tensor:
    model: Any = nn.Sequential(linear(2, 2), linear(2, 2))
    model[1].weight = model[0].weight
    fully_shard(model)
    model(torch.ones(1, 2)).sum().backward()
    return whole(model[0].weight.grad)


def first_layer_on_its_own() -> Tensor:
    model: Any = nn.Sequential(linear(1, 2), linear(2, 1))
    for layer in (*model, model):
        fully_shard(layer)
    model(own_row()).sum().backward()
    return whole(model[0].weight.grad)


# DistributedDataParallel's hooks


def reduced_copy_unused() -> Tensor:
    model, row = DistributedDataParallel(linear(4, 4)), torch.eye(4)[dist.get_rank()]
    state = powerSGD_hook.PowerSGDState(
        None, start_powerSGD_iter=2, min_compression_rate=0.5, use_error_feedback=False, warm_start=False
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(3):
        model.zero_grad()
        (model(torch.ones(1, 4)) * row).sum().backward()
    return whole(model.module.weight.grad)


# tensor parallel


def placements_of_gradient_ignored() -> Tensor:
    weight = distribute_tensor(torch.ones(1), both_ranks(), [Replicate()]).requires_grad_()
    (weight.to_local(grad_placements=[Partial()]) * own_row()).sum().backward()
    return whole(weight.grad)


def input_gradient_of_one_rank() -> Tensor:
    layer = parallelize_module(linear(1, 2), both_ranks(), ColwiseParallel())
    x = torch.ones(1, 1, requires_grad=True)
    layer(x).sum().backward()
    return whole(x.grad)


def largest_of_own_columns() -> Tensor:
    logits = torch.tensor([[1.0, 1.0, 2.0, 4.0]]).log()
    local = distribute_tensor(logits, both_ranks(), [Shard(1)]).requires_grad_()
    with loss_parallel():
        nn.functional.cross_entropy(local, torch.tensor([0])).backward()
    return whole(local.grad)


# optimizers


def decay_of_the_defaults() -> Tensor:
    params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    for param in params:
        param.grad = torch.zeros(1)
    groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=0.5, weight_decay=0.5).step()
    return torch.cat([param.detach() for param in params])


def frozen_state_not_saved() -> Tensor:
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    runs = [torch.optim.SGD(params, lr=1.0, momentum=0.5) for _ in range(2)]
    for param in params:
        param.grad = torch.ones(1)
    runs[0].step()
    params[0].requires_grad = False
    state = runs[0].state_dict()
    params[0].requires_grad = True
    runs[1].load_state_dict(state)
    runs[1].step()
    return torch.cat([param.detach() for param in params])


# clipping


def always_the_two_norm() -> Tensor:
    model = linear(2, 1)
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 2.0, float("inf"), foreach=False)
    return whole(model.weight.grad)


# mixed precision


def casts_of_last_step() -> Tensor:
    model = linear(2, 1)
    run = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        run.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(torch.ones(1, 2))
        output.sum().backward()
        run.step()
    return output.detach().float()


def growth_counted_anew() -> Tensor:
    param = nn.Parameter(torch.ones(1))
    run = torch.optim.SGD([param], lr=1.0)
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) for _ in range(2)]
    for scaler in scalers:
        scaler.load_state_dict(scalers[0].state_dict())
        scaler.scale(param.sum()).backward()
        scaler.step(run)
        scaler.update()
    return torch.tensor(scalers[1].get_scale())


# schedules


def warm_up_and_decay() -> tuple[torch.optim.Optimizer, lr_scheduler.SequentialLR]:
    run = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    warm_up = lr_scheduler.ConstantLR(run, factor=0.5, total_iters=1)
    decay = lr_scheduler.LinearLR(run, start_factor=1.0, end_factor=0.0, total_iters=4)
    return run, lr_scheduler.SequentialLR(run, [warm_up, decay], milestones=[1])


def second_schedule_begins_again() -> Tensor:
    before, schedule = warm_up_and_decay()
    for _ in range(2):
        before.step()
        schedule.step()
    after, resumed = warm_up_and_decay()
    after.load_state_dict(before.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    after.step()
    resumed.step()
    return torch.tensor(resumed.get_last_lr())


# pipelines


def earlier_batches_forgotten() -> Tensor:
    rank, module, grads = dist.get_rank(), Times(1.0), torch.zeros(NUM_RANKS)
    schedule = Schedule1F1B(PipelineStage(module, rank, 2, CPU), 2, sum_of_errors, scale_grads=False)
    for _ in range(2):
        stepped(schedule, torch.ones(2, 1))
    grads[rank] = whole(module.weight.grad)
    return of_both(grads)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return scale * x @ self.weight


def first_keywords_for_all() -> Tensor:
    rank, module, grads = dist.get_rank(), Scaled(), torch.zeros(NUM_RANKS)
    schedule = Schedule1F1B(PipelineStage(module, rank, 2, CPU), 2, sum_of_errors, scale_grads=False)
    inputs = (torch.ones(2, 1),) if rank == 0 else ()
    schedule.step(*inputs, target=torch.zeros(2, 1), scale=torch.tensor([[1.0], [2.0]]))
    grads[rank] = whole(module.weight.grad)
    return of_both(grads)


# checkpoints


def step_of_rank_0_not_sent() -> Tensor:
    model = linear(1, 2)
    fully_shard(model)
    runs = [torch.optim.AdamW(model.parameters()) for _ in range(2)]
    for _ in range(3):
        model(own_row()).sum().backward()
        runs[0].step()
        runs[0].zero_grad()
    state = get_optimizer_state_dict(model, runs[0], options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, runs[1], state, options=options)
    return torch.stack([each["step"] for each in runs[1].state.values()])


# differentiable collectives


def gradient_stays_with_receiver() -> Tensor:
    x, everyone = torch.ones(2, requires_grad=True), both_ranks()
    ((1.0 + dist.get_rank()) * all_to_all_single(x, None, None, everyone)).sum().backward()
    return whole(x.grad)


RIGHT: dict[str, Any] = {
    "tied_weights_part": [[3.0, 7.0], [5.0, 9.0]],
    "first_layer_on_its_own": [[0.0], [1.5]],
    "reduced_copy_unused": [[0.5] * 4, [0.5] * 4, [0.0] * 4, [0.0] * 4],
    "placements_of_gradient_ignored": [3.0],
    "input_gradient_of_one_rank": [[1.0]],
    "largest_of_own_columns": [[-0.875, 0.125, 0.25, 0.5]],
    "decay_of_the_defaults": [0.75, 1.0],
    "frozen_state_not_saved": [-2.5, -2.5],
    "always_the_two_norm": [[1.5, 2.0]],
    "casts_of_last_step": [[-1.0]],
    "growth_counted_anew": 8.0,
    "second_schedule_begins_again": [0.5],
    "earlier_batches_forgotten": [4.0, 4.0],
    "first_keywords_for_all": [5.0, 5.0],
    "step_of_rank_0_not_sent": [3.0],
    "gradient_stays_with_receiver": [1.0, 2.0],
}
"""Answers worked out by hand, the same on all ranks."""


if __name__ == "__main__":
    show(__spec__.name, BLIND_SIXTH)
