# mypy: disable-error-code="no-untyped-call, no-any-return, operator, attr-defined"
"""Programs of torch alone, one for each rule of `BLIND_EIGHTH`: `python -m tests.planted.bare.blind_training_8`.

It runs each program with its rule and without it, and prints both answers. It fails if they are equal on all ranks, or
if the answer without the rule differs from `RIGHT`. Names of rules as arguments choose some of them.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.nn.functional import reduce
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from tests.planted.bare.blind_training import linear, whole
from tests.planted.bare.blind_training_2 import Times, stepped, sum_of_errors
from tests.planted.bare.blind_training_3 import CPU, NUM_RANKS, both_ranks, exact, of_both
from tests.planted.bare.blind_training_5 import own_row, shared_folder
from tests.planted.bare.training import show
from tests.planted.training import BLIND_EIGHTH

# FSDP2 and replicate


def waiting_gradient_counted_twice() -> Tensor:
    model = linear(1, 2)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        model(own_row()).sum().backward()
    return whole(model.weight.grad)


def middle_micro_batch_lost() -> Tensor:
    model: Any = replicate(linear(1, 2), mesh=both_ranks())
    for is_last in (False, False, True):
        model.set_requires_all_reduce(is_last)
        model(own_row()).sum().backward()
    return whole(model.weight.grad)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.output = exact(linear(2, 2)), linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(x)
        return x, self.output(x.float())


def first_of_group_not_cast() -> Tensor:
    model = Head()
    fully_shard([model.norm, model.output], mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    fully_shard(model)
    return model(torch.tensor([[1.0, 0.0]]))[0].float().detach()


def aborted_step_counts() -> Tensor:
    model: Any = replicate(linear(1, 2), mesh=both_ranks())
    model.set_requires_all_reduce(False)
    model(own_row()).sum().backward()
    with suppress(RuntimeError):
        model(torch.ones(1, 3))  # of another width
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    model(own_row()).sum().backward()
    return whole(model.weight.grad)


# hooks of DistributedDataParallel


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(4, 4), linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)[:, 0] + 3 * self.second(x)[:, 0]


def first_of_batch_for_all() -> Tensor:
    model, row = DistributedDataParallel(Pair()), own_row() * torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    state = powerSGD_hook.PowerSGDState(
        None, start_powerSGD_iter=2, min_compression_rate=1, batch_tensors_with_same_shape=True
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(3):
        model.zero_grad()
        model(row).sum().backward()
    return torch.stack([whole(layer.weight.grad)[0, 0] for layer in (model.module.first, model.module.second)])


def subgroup_not_used() -> Tensor:
    model, (subgroup, _) = DistributedDataParallel(linear(1, 1)), dist.new_subgroups(group_size=1)
    state = PostLocalSGDState(None, subgroup, start_localSGD_iter=1)
    model.register_comm_hook(state, post_localSGD_hook)
    for _ in range(2):
        model.zero_grad()
        model(own_row()).sum().backward()
    return of_both(model.module.weight.grad.square())


# tensor parallel


def nested_source_is_rank_0() -> Tensor:
    layer = linear(1, 2)
    with torch.no_grad():
        layer.weight.add_(10 * dist.get_rank())
    model, plan = nn.Sequential(nn.Sequential(layer)), {"0.0": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, both_ranks(), plan, src_data_rank=None)
    return whole(model(torch.ones(1, 1)))


def local_gradient_as_its_input() -> Tensor:
    mesh = both_ranks()
    x = distribute_tensor(torch.tensor([[1.0], [2.0]]), mesh, [Shard(0)])
    weight = distribute_tensor(torch.ones(1, 1), mesh, [Replicate()]).requires_grad_()
    product: Any = local_map(
        torch.matmul,
        out_placements=[Shard(0)],
        in_placements=([Shard(0)], [Replicate()]),
        in_grad_placements=([Shard(0)], [Partial()]),
    )
    product(x, weight).sum().backward()
    return whole(weight.grad)


def custom_index_not_ignored() -> Tensor:
    logits = torch.tensor([[1.0, 1.0, 2.0, 4.0]] * 2).log()
    local = distribute_tensor(logits, both_ranks(), [Shard(1)]).requires_grad_()
    with loss_parallel():
        nn.functional.cross_entropy(local, torch.tensor([0, 3]), ignore_index=0).backward()
    return whole(local.grad)


# optimizers and schedules


def resumed_rate_decays_again() -> Tensor:
    run = torch.optim.SGD([{"params": nn.Parameter(torch.zeros(1)), "lr": 0.25, "initial_lr": 1.0}])
    lr_scheduler.ExponentialLR(run, gamma=0.5, last_epoch=2)
    return torch.tensor(run.param_groups[0]["lr"])


def cooldown_counts_bad_epochs() -> Tensor:
    run = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = lr_scheduler.ReduceLROnPlateau(run, factor=0.5, patience=0, cooldown=2)
    for _ in range(4):
        run.step()
        schedule.step(1.0)
    return torch.tensor(run.param_groups[0]["lr"])


def complex_gradient_squared() -> Tensor:
    param = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    run = torch.optim.Adam([param], lr=1.0, foreach=True)
    param.grad = torch.tensor([3.0 - 2.0j])
    run.step()
    return torch.view_as_real(param.detach())


def first_group_broadcast() -> Tensor:
    params = [nn.Parameter(torch.zeros(1)) for _ in range(4)]
    groups = [{"params": params[:2], "lr": 1.0}, {"params": params[2:], "lr": 0.5}]
    run = ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=1.0)
    for param in params:
        param.grad = torch.ones(1)
    run.step()
    return torch.cat(params).detach()


# clipping and the scaler


def whole_gradients_of_all_ranks() -> Tensor:
    layers = nn.Sequential(linear(1, 2), linear(2, 2))
    model = FullyShardedDataParallel(layers, device_id=CPU, use_orig_params=True, ignored_states=[layers[1].weight])
    model(torch.ones(1, 1)).sum().backward()
    return model.clip_grad_norm_(1.0).square()


def good_step(scaler: Any) -> None:
    param = nn.Parameter(torch.zeros(1))
    run = torch.optim.SGD([param])
    scaler.scale(param.sum()).backward()
    scaler.step(run)
    scaler.update()


def good_steps_not_saved() -> Tensor:
    saved, resumed = (torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) for _ in range(2))
    good_step(saved)
    resumed.load_state_dict(saved.state_dict())
    good_step(resumed)
    return torch.tensor(resumed.get_scale())


# recomputation and pipelines


def gradient_of_output_before() -> Tensor:
    x = torch.ones(1, requires_grad=True)
    mean, twice = checkpoint(lambda x: (x.detach() + 2, 2 * x), x, use_reentrant=True)
    (mean * twice).sum().backward()
    return whole(x.grad)


def inner_shards_not_reduced() -> Tensor:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (NUM_RANKS, 1), mesh_dim_names=("pp", "dp"))
    layer = Times(2.0 + rank)
    module = nn.Sequential(fully_shard(layer, mesh=mesh["dp"]))
    fully_shard(module, mesh=mesh["dp"])
    stepped(Schedule1F1B(PipelineStage(module, rank, 2, CPU), 2, sum_of_errors), torch.arange(1.0, 5.0).view(4, 1))
    grads = torch.zeros(2)
    grads[rank] = whole(layer.weight.grad)
    return of_both(grads)


# distributed checkpoint and state


def gradients_lost_by_saving() -> Tensor:
    model = linear(1, 1)
    run = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 1)).sum().backward()
    get_optimizer_state_dict(model, run)
    run.step()
    return model.weight.detach()


def shards_read_to_the_beginning() -> Tensor:
    folder = shared_folder()
    dcp.save({"row": distribute_tensor(torch.arange(4.0), both_ranks(), [Shard(0)])}, checkpoint_id=folder)
    state = {"row": torch.zeros(4)}
    dcp.load(state, checkpoint_id=folder)
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return state["row"]


def views_staged_as_their_base() -> Tensor:
    folder, stager = shared_folder(), DefaultStager(StagingOptions(*(False,) * 4))
    table = torch.arange(4.0).view(2, 2)
    saved: Any = dcp.async_save({"row": table[1]}, checkpoint_id=folder, async_stager=stager)
    saved.result()
    state = {"row": torch.zeros(2)}
    dcp.load(state, checkpoint_id=folder)
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return state["row"]


# differentiable collectives


def gradient_stays_at_destination() -> Tensor:
    x = torch.ones(1, requires_grad=True)
    is_there = dist.get_rank() == 0
    (3.0 * is_there * reduce(x, dst=0)).sum().backward()
    return whole(x.grad)


def functional_sum_passes_its_own() -> Tensor:
    x = torch.ones(1, requires_grad=True)
    ((1.0 + dist.get_rank()) * all_reduce(x, "sum", dist.group.WORLD)).sum().backward()
    return whole(x.grad)


RIGHT: dict[str, Any] = {
    "waiting_gradient_counted_twice": [[3.0], [3.0]],
    "middle_micro_batch_lost": [[4.5], [4.5]],
    "first_of_group_not_cast": [[1.0, 1.0]],
    "aborted_step_counts": [[1.5], [1.5]],
    "first_of_batch_for_all": [1.5, 4.5],
    "subgroup_not_used": [[5.0]],
    "nested_source_is_rank_0": [[0.0, 11.0]],
    "local_gradient_as_its_input": [[3.0]],
    "custom_index_not_ignored": [[0.0] * 4, [0.125, 0.125, 0.25, -0.5]],
    "resumed_rate_decays_again": 0.25,
    "cooldown_counts_bad_epochs": 0.5,
    "complex_gradient_squared": [[-1.0, 1.0]],
    "first_group_broadcast": [-1.0, -1.0, -0.5, -0.5],
    "whole_gradients_of_all_ranks": 22.0,
    "good_steps_not_saved": 8.0,
    "gradient_of_output_before": [6.0],
    "inner_shards_not_reduced": [15.0, 10.0],
    "gradients_lost_by_saving": [[-1.0]],
    "shards_read_to_the_beginning": [0.0, 1.0, 2.0, 3.0],
    "views_staged_as_their_base": [2.0, 3.0],
    "gradient_stays_at_destination": [3.0],
    "functional_sum_passes_its_own": [3.0],
}
"""Answers worked out by hand, the same on all ranks."""


if __name__ == "__main__":
    show(__spec__.name, BLIND_EIGHTH)
