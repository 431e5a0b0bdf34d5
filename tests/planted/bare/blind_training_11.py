# mypy: disable-error-code="no-untyped-call, no-any-return, operator, attr-defined"
"""Programs of torch alone, one for each rule of `BLIND_ELEVENTH`: `python -m tests.planted.bare.blind_training_11`.

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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.nn.functional import reduce_scatter
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from tests.planted.bare.blind_training import linear, whole
from tests.planted.bare.blind_training_2 import Times, sum_of_errors
from tests.planted.bare.blind_training_3 import CPU, both_ranks, of_both
from tests.planted.bare.blind_training_4 import one_stage
from tests.planted.bare.blind_training_5 import shared_folder
from tests.planted.bare.blind_training_9 import by_rank
from tests.planted.bare.blind_training_10 import Named
from tests.planted.bare.training import show, trained
from tests.planted.training import BLIND_ELEVENTH

NUM_RANKS = {"half_of_the_division": 4, "shard_by_rank_in_world": 4, "hybrid_over_shards": 4}
"""Numbers of ranks that show a rule, if two do not."""


def own_row() -> Tensor:
    return torch.full((1, 1), 1.0 + dist.get_rank())


def two_axes(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("first", "second"))


# FSDP2


def half_of_the_division() -> Tensor:
    model = linear(1, 4, dtype=torch.float64)
    fully_shard(model)
    model(own_row().double()).sum().backward()
    return whole(model.weight.grad)


def shard_by_rank_in_world() -> Tensor:
    model = linear(1, 2)
    fully_shard(model, mesh=two_axes(2, 2)["first"])
    return model(torch.ones(1, 1)).detach()


def dict_of_outputs_unseen() -> Tensor:
    model = Named()
    fully_shard(model)
    model(own_row()[0])["output"].sum().backward()
    return whole(model.weight.grad)


# FSDP1


def stepped_once(model: Any) -> Tensor:
    """Returns the weight of a sharded layer after a step at a rate of 1."""
    run = torch.optim.SGD(model.parameters(), lr=1.0)
    model(1 + (own_row() - 1) / 128).sum().backward()
    run.step()
    with FullyShardedDataParallel.summon_full_params(model):
        return model.module.weight.detach().clone()


def hybrid_over_shards() -> Tensor:
    model = FullyShardedDataParallel(
        linear(1, 2),
        device_mesh=two_axes(2, 2),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=CPU,
        use_orig_params=True,
    )
    return stepped_once(model)


def computed_and_reduced_in_one_dtype() -> Tensor:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layer = FullyShardedDataParallel(linear(1, 2), device_id=CPU, use_orig_params=True, mixed_precision=precision)
    return stepped_once(layer)


# DistributedDataParallel and averages


def error_not_fed_back() -> Tensor:
    """Returns the sum of two compressed gradients and of what the ranks have kept."""
    model, row, sent = DistributedDataParallel(linear(2, 2)), torch.eye(2)[[dist.get_rank()]], torch.zeros(2, 2)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(4):
        model.zero_grad()
        (model(row) * row).sum().backward()
        sent += whole(model.module.weight.grad) * (step >= 2)
    (kept,) = state.error_dict.values()
    return sent + of_both(kept / 2).view(2, 2)


def mean_by_all_ranks() -> Tensor:
    param = nn.Parameter(own_row())
    param.grad = torch.zeros(1, 1)
    alone, _ = dist.new_subgroups(group_size=1)
    PeriodicModelAverager(period=1, process_group=alone).average_parameters([param])
    return by_rank(param)


# tensor parallel and DTensor


def softmax_of_own_columns() -> Tensor:
    logits = torch.tensor([[1.0, 1.0, 2.0, 4.0]]).log()
    local = distribute_tensor(logits, both_ranks(), [Shard(1)]).requires_grad_()
    with loss_parallel():
        nn.functional.cross_entropy(local, torch.tensor([3])).backward()
    return whole(local.grad)


def reduced_by_sum() -> Tensor:
    model = linear(1, 2)
    fully_shard(model)
    (model(torch.ones(1, 1)) * torch.tensor([3.0, 5.0])).sum().backward()
    return whole(nn.utils.clip_grad_norm_(model.parameters(), 1.0, float("inf")))


def replicated_from_rank_0() -> Tensor:
    return whole(distribute_tensor(own_row(), both_ranks(), [Replicate()], src_data_rank=1))


# optimizers and schedules


def fused_decay_coupled() -> Tensor:
    return trained(torch.optim.AdamW, lr=0.5, weight_decay=0.5, fused=True)


def momentum_steps(*, resumes: bool) -> Tensor:
    param = nn.Parameter(torch.zeros(1))
    run = torch.optim.SGD([param], lr=1.0, momentum=0.5, nesterov=True)
    for step in range(2):
        if resumes and step:
            state, run = run.state_dict(), torch.optim.SGD([param], lr=1.0, momentum=0.5, nesterov=True)
            run.load_state_dict(state)
        param.grad = torch.ones(1)
        run.step()
    return param.detach()


def nesterov_until_resumed() -> Tensor:
    return momentum_steps(resumes=True)


def gradients_for_steps() -> Tensor:
    return trained(torch.optim.Adadelta, foreach=True)


def decayed_without_rate() -> Tensor:
    return trained(torch.optim.NAdam, lr=0.5, weight_decay=0.5, decoupled_weight_decay=True, foreach=True)


class Halving:
    """A rate that a part of the program halves."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, epoch: int) -> float:
        return self.factor


def callable_begins_again() -> Tensor:
    runs = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(2)]
    rates = [Halving(), Halving()]
    saved, resumed = (lr_scheduler.LambdaLR(run, rate) for run, rate in zip(runs, rates, strict=True))
    rates[0].factor = 0.5
    resumed.load_state_dict(saved.state_dict())
    runs[1].step()
    resumed.step()
    return torch.tensor(resumed.get_last_lr())


# recomputation


def gradients_end_at_checkpoint() -> Tensor:
    x = torch.ones(1, requires_grad=True)
    checkpoint(lambda y: y * 3, x * 2, use_reentrant=True).sum().backward()
    return whole(x.grad)


class Scaled(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + 2 * scale


def keywords_from_the_front() -> Tensor:
    model = checkpoint_wrapper(Scaled(), CheckpointImpl.REENTRANT)
    return model(torch.ones(1, requires_grad=True), scale=torch.full((1,), 3.0)).detach()


# pipelines


def second_step_not_reduced() -> Tensor:
    module, pipeline = Times(1.0), two_axes(2, 1).get_group("second")
    modules = (DistributedDataParallel(module, find_unused_parameters=True), Times(1.0))
    stages: list[Any] = [PipelineStage(each, index, 2, CPU, group=pipeline) for index, each in enumerate(modules)]
    schedule = ScheduleInterleaved1F1B(stages, 2, sum_of_errors, scale_grads=False)
    for _ in range(2):
        module.zero_grad()
        schedule.step(own_row().expand(2, 1), target=torch.zeros(2, 1))
    return by_rank(whole(module.weight.grad))


def sum_of_micro_batches() -> Tensor:
    module, x = Times(1.0), torch.tensor([[1.0], [2.0]])
    ScheduleGPipe(one_stage(module), 2, sum_of_errors).step(x, target=torch.zeros_like(x))
    return whole(module.weight.grad)


# distributed checkpoint


def converted_to_float32() -> Tensor:
    folder = shared_folder()
    dcp.save({"tokens": torch.tensor([2**24 + 1])}, checkpoint_id=f"{folder}/sharded")
    if dist.get_rank() == 0:
        dcp_to_torch_save(f"{folder}/sharded", f"{folder}/converted")
    dist.barrier()
    tokens = torch.load(f"{folder}/converted")["tokens"].long()
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return tokens


def loaded_into_a_copy() -> Tensor:
    folder = shared_folder()
    dcp.save({"weight": torch.ones(2), "step": 5}, checkpoint_id=folder)
    state: dict[str, Any] = {"weight": torch.zeros(2), "step": 0}
    dcp.load(state, checkpoint_id=folder)
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return torch.tensor(state["step"])


def own_options_kept() -> Tensor:
    model, options = linear(1, 2), StateDictOptions(full_state_dict=True)
    fully_shard(model)
    saved, resumed = (torch.optim.AdamW(model.parameters(), lr=rate) for rate in (0.5, 0.25))
    set_optimizer_state_dict(model, resumed, get_optimizer_state_dict(model, saved, options=options), options=options)
    return torch.tensor(resumed.param_groups[0]["lr"])


# context parallel and collectives


def all_along_first_dim() -> Tensor:
    tokens, angles = torch.arange(4.0).view(1, 4), torch.arange(8.0).view(4, 2)
    with context_parallel(both_ranks(), buffers=[tokens, angles], buffer_seq_dims=[1, 0]):
        return by_rank(angles.flatten())


def own_gradient_for_all_parts() -> Tensor:
    x = torch.ones(2, requires_grad=True)
    part = reduce_scatter(torch.zeros(1), list(x.split(1)))
    ((1.0 + dist.get_rank()) * part).sum().backward()
    return by_rank(whole(x.grad))


RIGHT: dict[str, Any] = {
    "half_of_the_division": [[2.5]] * 4,
    "shard_by_rank_in_world": [[0.0, 1.0]],
    "dict_of_outputs_unseen": [1.5] * 2,
    "hybrid_over_shards": [[-1 - 1.5 / 128], [-1.5 / 128]],
    "computed_and_reduced_in_one_dtype": [[-1 - 0.5 / 128], [-0.5 / 128]],
    "error_not_fed_back": [[1.0, 0.0], [0.0, 1.0]],
    "mean_by_all_ranks": [[[1.0]], [[2.0]]],
    "softmax_of_own_columns": [[0.125, 0.125, 0.25, -0.5]],
    "reduced_by_sum": 5.0,
    "replicated_from_rank_0": [[2.0]],
    "fused_decay_coupled": partial(trained, torch.optim.AdamW, lr=0.5, weight_decay=0.5, foreach=False),
    "nesterov_until_resumed": partial(momentum_steps, resumes=False),
    "gradients_for_steps": partial(trained, torch.optim.Adadelta, foreach=False),
    "decayed_without_rate": partial(
        trained, torch.optim.NAdam, lr=0.5, weight_decay=0.5, decoupled_weight_decay=True, foreach=False
    ),
    "callable_begins_again": [0.5],
    "gradients_end_at_checkpoint": [6.0],
    "keywords_from_the_front": [7.0],
    "second_step_not_reduced": [[[3.0]], [[3.0]]],
    "sum_of_micro_batches": [[1.5]],
    "converted_to_float32": [2**24 + 1],
    "loaded_into_a_copy": 5,
    "own_options_kept": 0.5,
    "all_along_first_dim": [[0.0, 1.0, 6.0, 7.0], [2.0, 3.0, 4.0, 5.0]],
    "own_gradient_for_all_parts": [[1.0, 2.0], [1.0, 2.0]],
}
"""Answers worked out by hand or by another way of the computation, the same on all ranks."""


if __name__ == "__main__":
    show(__spec__.name, BLIND_ELEVENTH, NUM_RANKS)
