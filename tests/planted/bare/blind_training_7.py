# mypy: disable-error-code="no-untyped-call, no-any-return, operator, attr-defined"
"""Programs of torch alone, one for each rule of `BLIND_SEVENTH`: `python -m tests.planted.bare.blind_training_7`.

It runs each program with its rule and without it, and prints both answers. It fails if they are equal on all ranks, or
if the answer without the rule differs from `RIGHT`. Names of rules as arguments choose some of them.
"""

from __future__ import annotations

import shutil
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._functional_collectives import reduce_scatter_single
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.nn.functional import gather
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    PrepareModuleInputOutput,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.planted.bare.blind_training import linear, whole
from tests.planted.bare.blind_training_2 import stepped, sum_of_errors
from tests.planted.bare.blind_training_3 import CPU, both_ranks, exact, of_both
from tests.planted.bare.blind_training_5 import own_row, shared_folder
from tests.planted.bare.training import show
from tests.planted.training import BLIND_SEVENTH

# FSDP2


class Encoder(nn.Linear):
    def encode(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def registered_output_not_cast() -> Tensor:
    model = exact(Encoder(2, 2, bias=False))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    register_fsdp_forward_method(model, "encode")
    return model.encode(torch.tensor([[1.0, 0.0]])).float().detach()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(1, 2), linear(1, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def loss_of_second_output() -> Tensor:
    model = Heads()
    fully_shard(model)
    model(own_row())[1].sum().backward()
    return whole(model.second.weight.grad)


def factor_lost_in_sums() -> Tensor:
    model = linear(1, 2)
    fully_shard(model)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    model(own_row()).sum().backward()
    return whole(model.weight.grad)


def columns_gathered_as_rows() -> Tensor:
    model = linear(4, 2)
    fully_shard(model, shard_placement_fn=lambda param: Shard(1))
    return model(torch.eye(4)).T.detach()


# DistributedDataParallel's hooks


def compressed_below_the_rate() -> Tensor:
    model, row = DistributedDataParallel(linear(4, 4)), torch.eye(4)[[dist.get_rank()]]
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(3):
        model.zero_grad()
        (model(row) * row).sum().backward()
    return whole(model.module.weight.grad)


def local_steps_reduce_anyway() -> Tensor:
    model = DistributedDataParallel(linear(1, 1))
    state = PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=1, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook)
    for _ in range(2):
        model.zero_grad()
        model(own_row()).sum().backward()
    return of_both(model.module.weight.grad.square())


# tensor parallel


class Centered(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def local_inputs_as_outputs() -> Tensor:
    style = PrepareModuleInputOutput(
        input_layouts=Shard(0),
        desired_input_layouts=Shard(0),
        output_layouts=Shard(0),
        desired_output_layouts=Replicate(),
    )
    return parallelize_module(Centered(), both_ranks(), style)(own_row())


def whole_gradient_taken_for_sum() -> Tensor:
    weight = distribute_tensor(torch.ones(2), both_ranks(), [Shard(0)]).requires_grad_()
    (weight.full_tensor(grad_placements=[Partial()]) * own_row()).sum().backward()
    return whole(weight.grad)


def class_weights_in_loss_alone() -> Tensor:
    logits = torch.tensor([[1.0, 1.0, 2.0, 4.0]] * 2).log()
    local = distribute_tensor(logits, both_ranks(), [Shard(1)]).requires_grad_()
    weights = distribute_tensor(torch.tensor([1.0, 1.0, 1.0, 3.0]), both_ranks(), [Replicate()])
    with loss_parallel():
        nn.functional.cross_entropy(local, torch.tensor([0, 3]), weight=weights).backward()
    return whole(local.grad)


# optimizers, schedules and averages


def rate_decays_early() -> Tensor:
    param = nn.Parameter(torch.zeros(1))
    run = torch.optim.Adagrad([param], lr=1.0, lr_decay=1.0, foreach=True)
    for _ in range(2):
        param.grad = torch.ones(1)
        run.step()
    return param.detach()


def beta_not_cycled() -> Tensor:
    run = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    schedule = lr_scheduler.CyclicLR(run, 1.0, 2.0, step_size_up=2, base_momentum=0.8, max_momentum=0.9)
    run.step()
    schedule.step()
    return torch.tensor(run.param_groups[0]["betas"][0])


def annealed_at_the_end() -> Tensor:
    run = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = swa_utils.SWALR(run, swa_lr=0.5, anneal_epochs=4, anneal_strategy="linear")
    for _ in range(2):
        run.step()
        schedule.step()
    return torch.tensor(schedule.get_last_lr())


def period_from_step_0() -> Tensor:
    param = nn.Parameter(torch.full((1,), float(dist.get_rank())))
    param.grad = torch.zeros(1)
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    for _ in range(2):
        averager.average_parameters([param])
    return of_both(param.square())


# mixed precision


def backward_in_default_dtype() -> Tensor:
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
            ctx.save_for_backward(weight)
            return x @ weight

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            return grad @ ctx.saved_tensors[0].T, None

    x = torch.ones(1, 1, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        output = Product.apply(x, torch.tensor([[1 + 2**-10]]))
    output.sum().backward()
    return whole(x.grad)


def used_scaler_keeps_its_scale() -> Tensor:
    saved, used = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (4.0, 16.0))
    used.scale(torch.ones(1))
    used.load_state_dict(saved.state_dict())
    return used.scale(torch.ones(1))


# recomputation and pipelines


def twice(x: Tensor, weight: Tensor) -> Tensor:
    return ((x @ weight).sin() @ weight).sin()


def saved_in_reverse() -> Tensor:
    x, weight = torch.ones(1, 2), torch.eye(2).mul(0.5).requires_grad_()
    saved = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    checkpoint(twice, x, weight, use_reentrant=False, context_fn=saved).sum().backward()
    return whole(weight.grad)


def not_recomputed() -> Tensor:
    x, weight = torch.ones(1, 2), torch.eye(2).mul(0.5).requires_grad_()
    twice(x, weight).sum().backward()
    return whole(weight.grad)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.weights[0], x * self.weights[1]


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([1.0, 3.0]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.weights[0] * x + self.weights[1] * y


def gradient_of_first_output() -> Tensor:
    rank = dist.get_rank()
    module = (Two(), Joined())[rank]
    schedule = Schedule1F1B(PipelineStage(module, rank, 2, CPU), 2, sum_of_errors, scale_grads=False)
    stepped(schedule, torch.ones(2, 1))
    grads = torch.zeros(2, 2)
    grads[rank] = whole(module.weights.grad)
    return of_both(grads)


# distributed checkpoint


def first_values_saved_again() -> Tensor:
    model, stager, folders = linear(1, 2), DefaultStager(StagingOptions(*(False,) * 4)), []
    for _ in range(2):
        folders.append(shared_folder())
        dcp.async_save(model.state_dict(), checkpoint_id=folders[-1], async_stager=stager).result()
        nn.init.constant_(model.weight, 7.0)  # the next step
    state = {"weight": torch.zeros(2, 1)}
    dcp.load(state, checkpoint_id=folders[-1])
    dist.barrier()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return state["weight"]


def behind_a_missing_key() -> Tensor:
    folder = shared_folder()
    dcp.save({"saved": torch.ones(2)}, checkpoint_id=folder)
    state = {"added": torch.zeros(2), "saved": torch.zeros(2)}
    dcp.load(state, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return torch.cat(list(state.values()))


def states_in_order_of_the_model() -> Tensor:
    model: Any = nn.Sequential(linear(1, 1), linear(1, 1))
    for layer, weight in zip(model, (2.0, 3.0), strict=True):
        nn.init.constant_(layer.weight, weight)
    groups = [{"params": model[1].parameters(), "lr": 0.5}, {"params": model[0].parameters()}]
    run = torch.optim.SGD(groups, lr=1.0, momentum=0.5)
    model(torch.ones(1, 1)).sum().backward()
    run.step()
    state: Any = get_optimizer_state_dict(model, run)["state"]
    return torch.cat([state[f"{index}.weight"]["momentum_buffer"].flatten() for index in range(2)])


# differentiable collectives


def gathered_at_rank_0() -> Tensor:
    x, is_there = torch.ones(1, requires_grad=True), dist.get_rank() == 1
    parts = torch.cat(gather(x, dst=1))
    (is_there * parts * torch.tensor([1.0, 2.0])).sum().backward()
    return of_both(whole(x.grad).square())


def scattered_gradients_averaged() -> Tensor:
    x = torch.ones(2, requires_grad=True)
    ((1.0 + dist.get_rank()) * reduce_scatter_single(x, "sum", 0, dist.group.WORLD)).sum().backward()
    return whole(x.grad)


RIGHT: dict[str, Any] = {
    "registered_output_not_cast": [[1.0, 1.0]],
    "loss_of_second_output": [[1.5], [1.5]],
    "factor_lost_in_sums": [[3.0], [3.0]],
    "columns_gathered_as_rows": [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]],
    "compressed_below_the_rate": [[0.5, 0.0, 0.0, 0.0], [0.0, 0.5, 0.0, 0.0], [0.0] * 4, [0.0] * 4],
    "local_steps_reduce_anyway": [[5.0]],
    "local_inputs_as_outputs": [[-0.5], [0.5]],
    "whole_gradient_taken_for_sum": [3.0, 3.0],
    "class_weights_in_loss_alone": [[-0.21875, 0.03125, 0.0625, 0.125], [0.09375, 0.09375, 0.1875, -0.375]],
    "rate_decays_early": [-1.0 - 0.5 / 2**0.5],
    "beta_not_cycled": 0.85,
    "annealed_at_the_end": [0.75],
    "period_from_step_0": [0.5],
    "backward_in_default_dtype": [[1.0009765625]],
    "used_scaler_keeps_its_scale": [4.0],
    "saved_in_reverse": not_recomputed,
    "gradient_of_first_output": [[2.0, 6.0], [2.0, 2.0]],
    "first_values_saved_again": [[7.0], [7.0]],
    "behind_a_missing_key": [0.0, 0.0, 1.0, 1.0],
    "states_in_order_of_the_model": [3.0, 2.0],
    "gathered_at_rank_0": [5.0],
    "scattered_gradients_averaged": [1.0, 2.0],
}
"""Answers worked out by hand, the same on all ranks."""


if __name__ == "__main__":
    show(__spec__.name, BLIND_SEVENTH)
