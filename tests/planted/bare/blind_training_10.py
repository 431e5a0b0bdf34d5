# mypy: disable-error-code="no-untyped-call, no-any-return, operator, attr-defined"
"""Programs of torch alone, one for each rule of `BLIND_TENTH`: `python -m tests.planted.bare.blind_training_10`.

It runs each program with its rule and without it, and prints both answers. It fails if they are equal on all ranks, or
if the answer without the rule differs from `RIGHT`. Names of rules as arguments choose some of them.
"""

from __future__ import annotations

import pickle
import shutil
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._functional_collectives import reduce_scatter_single
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.nn.functional import all_to_all
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from tests.planted.bare.blind_training import linear, whole
from tests.planted.bare.blind_training_2 import Times
from tests.planted.bare.blind_training_3 import CPU, both_ranks, of_both
from tests.planted.bare.blind_training_5 import gradients_of_stages, shared_folder
from tests.planted.bare.blind_training_9 import by_rank
from tests.planted.bare.training import recomputed, show
from tests.planted.training import BLIND_TENTH

NUM_RANKS = {"replicas_never_meet": 4, "piece_by_first_axis": 4}
"""Numbers of ranks that show a rule, if two do not."""


def own_row() -> Tensor:
    return torch.full((1, 1), 1.0 + dist.get_rank())


def two_axes(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("first", "second"))


# FSDP2


def replicas_never_meet() -> Tensor:
    model = linear(1, 4)
    fully_shard(model, mesh=two_axes(2, 2))
    model(own_row()).sum().backward()
    return whole(model.weight.grad)


def never_all_reduced_again() -> Tensor:
    model: Any = linear(1, 2)
    fully_shard(model, mesh=two_axes(2, 1))
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        model(own_row()).sum().backward()
    return whole(model.weight.grad)


def own_factor_and_the_mean() -> Tensor:
    model: Any = linear(1, 2)
    fully_shard(model, mesh=two_axes(2, 1))
    model.set_gradient_divide_factor(4.0)
    model(own_row()).sum().backward()
    return whole(model.weight.grad)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"output": x * self.weight}


def outputs_in_a_dict() -> Tensor:
    model = Named()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))
    return (model(torch.ones(2))["output"] + 2**-10).float().detach()


# FSDP1


def last_backward_replaces() -> Tensor:
    model = FullyShardedDataParallel(linear(1, 4), device_id=CPU, use_orig_params=True)
    for factor in (1.0, 2.0):
        model(torch.full((1, 1), factor)).sum().backward()
    part = torch.zeros(4)
    part[2 * dist.get_rank() :][:2] = model.module.weight.grad.flatten()
    return of_both(part)


# DistributedDataParallel


def compressed_steps(*, resumes: bool) -> Tensor:
    layer = linear(4, 4)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    for part in range(2):
        if part == 0 or resumes:
            model = DistributedDataParallel(layer)
            state = pickle.loads(pickle.dumps(state)) if part else state
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for _ in range(3):
            model.zero_grad()
            (model(torch.eye(4)) * torch.arange(16.0).view(4, 4) ** (1 + dist.get_rank())).sum().backward()
    return whole(layer.weight.grad)


def errors_forgotten_by_resuming() -> Tensor:
    return compressed_steps(resumes=True)


class Shifted(nn.Module):
    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.shift


def buffers_of_the_world() -> Tensor:
    groups = [dist.new_group([rank]) for rank in range(2)]
    model = DistributedDataParallel(Shifted(own_row()), process_group=groups[dist.get_rank()])
    return by_rank(model(torch.zeros(1)))


def hook_of_replicate() -> Tensor:
    model: Any = replicate(linear(1, 1))
    model.register_comm_hook(None, fp16_compress_hook)
    model(torch.full((1, 1), 1 + 2**-11)).sum().backward()
    return whole(model.weight.grad)


# tensor parallel and DTensor


def bias_once_for_each_rank() -> Tensor:
    layer = linear(2, 1, bias=True)
    nn.init.constant_(layer.bias, 3.0)
    parallelize_module(layer, both_ranks(), RowwiseParallel(input_layouts=Replicate()))
    return torch.as_tensor(layer(torch.ones(1, 2)).detach())


def gradient_of_partial_divided() -> Tensor:
    x = torch.ones(2, requires_grad=True)
    added_up: Any = DTensor.from_local(x, both_ranks(), [Partial()]).redistribute(placements=[Replicate()])
    (added_up.to_local() * 3.0).sum().backward()
    return whole(x.grad)


def piece_by_first_axis() -> Tensor:
    x = torch.arange(4.0).view(2, 2)
    rows = distribute_tensor(x, two_axes(2, 2), [Replicate(), Shard(0)])
    return rows.redistribute(placements=[Replicate(), Shard(1)]).full_tensor()


def second_output_as_first() -> Tensor:
    both: Any = local_map(lambda x: (x, x.sum(0)), out_placements=([Shard(0)], [Partial()]))
    _, added_up = both(distribute_tensor(torch.arange(4.0).view(4, 1), both_ranks(), [Shard(0)]))
    return added_up.full_tensor()


# optimizers and schedules


def states_in_order_of_ranks() -> Tensor:
    params = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    run, resumed = (ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=1.0, momentum=0.5) for _ in range(2))
    for index, param in enumerate(params):
        param.grad = torch.full((1,), 1.0 + index)
    run.step()
    run.consolidate_state_dict()
    states: list[Any] = [None if dist.get_rank() else run.state_dict()]
    dist.broadcast_object_list(states)
    resumed.load_state_dict(states[0])
    resumed.step()
    return torch.cat(params).detach()


def rates(*, resumes: bool) -> list[float]:
    run = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, seen = lr_scheduler.CosineAnnealingLR(run, 4), []
    for step in range(4):
        if resumes and step == 2:
            saved, run = run.state_dict(), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
            state, schedule = schedule.state_dict(), lr_scheduler.CosineAnnealingLR(run, 4)
            run.load_state_dict(saved)
            schedule.load_state_dict(state)
        run.step()
        schedule.step()
        seen.append(run.param_groups[0]["lr"])
    return seen


def epochs_from_zero() -> list[float]:
    return rates(resumes=True)


# clipping and the scaler


def norms_of_shards_added() -> Tensor:
    model = linear(1, 2)
    fully_shard(model)
    (model(torch.ones(1, 1)) * torch.tensor([3.0, 4.0])).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return whole(model.weight.grad)


def infinity_stays_at_its_rank() -> Tensor:
    model = FullyShardedDataParallel(linear(1, 2), device_id=CPU, use_orig_params=True)
    run, scaler = torch.optim.SGD(model.parameters(), lr=1.0), ShardedGradScaler("cpu", init_scale=1.0)
    scaler.scale((model(torch.ones(1, 1)) * torch.tensor([float("inf"), 1.0])).sum()).backward()
    scaler.step(run)
    scaler.update()
    with FullyShardedDataParallel.summon_full_params(model):
        return model.module.weight.detach().clone()


# recomputation and pipelines


def other_elements_dropped() -> Tensor:
    return recomputed(use_reentrant=True)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum()


def target_of_batch_before() -> Tensor:
    rank = dist.get_rank()
    module = Times(1.0)
    schedule = ScheduleGPipe(PipelineStage(module, rank, 2, CPU), 2, squared_error, scale_grads=False)
    x, target = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [4.0]])
    schedule.step(*([] if rank else [x]), target=target)
    return by_rank(whole(module.weight.grad))


def split_backward_from_ones() -> Tensor:
    return gradients_of_stages(2.0)


# distributed checkpoint


def loaded(storage_writer: Any, storage_reader: Any) -> Tensor:
    """Saves a whole tensor and loads it into a sharded one."""
    folder = shared_folder()
    dcp.save({"rows": torch.arange(4.0)}, storage_writer=storage_writer(folder))
    state = {"rows": distribute_tensor(torch.zeros(4), both_ranks(), [Shard(0)])}
    dcp.load(state, storage_reader=storage_reader(folder))
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return state["rows"].full_tensor()


def first_shard_for_all() -> Tensor:
    return loaded(dcp.FileSystemWriter, dcp.FileSystemReader)


def slices_without_offset() -> Tensor:
    return loaded(dcp.HuggingFaceStorageWriter, dcp.HuggingFaceStorageReader)


# averages


def average_ends_at_frozen() -> Tensor:
    params = [nn.Parameter(torch.full((1,), float(dist.get_rank()))) for _ in range(3)]
    for param in (params[0], params[2]):
        param.grad = torch.zeros(1)
    PeriodicModelAverager(period=1).average_parameters([{"params": params}])
    return by_rank(torch.cat(params))


# collectives


def columns_scattered_as_viewed() -> Tensor:
    x = torch.arange(8.0).view(2, 4)
    return by_rank(reduce_scatter_single(x, "sum", scatter_dim=1, group=dist.group.WORLD) + 0)


def gradients_not_sent_back() -> Tensor:
    x = torch.ones(2, requires_grad=True)
    parts = all_to_all([torch.zeros(1) for _ in range(2)], list(x.split(1)))
    (torch.cat(parts) * torch.tensor([1.0, 2.0]) * (1.0 + 2 * dist.get_rank())).sum().backward()
    return by_rank(whole(x.grad))


RIGHT: dict[str, Any] = {
    "replicas_never_meet": [[2.5]] * 4,
    "never_all_reduced_again": [[3.0]] * 2,
    "own_factor_and_the_mean": [[0.75]] * 2,
    "outputs_in_a_dict": [1 + 2**-10] * 2,
    "last_backward_replaces": [3.0] * 4,
    "errors_forgotten_by_resuming": partial(compressed_steps, resumes=False),
    "buffers_of_the_world": [[[1.0]], [[2.0]]],
    "hook_of_replicate": [[1.0]],
    "bias_once_for_each_rank": [[4.0]],
    "gradient_of_partial_divided": [3.0] * 2,
    "piece_by_first_axis": [[0.0, 1.0], [2.0, 3.0]],
    "second_output_as_first": [6.0],
    "states_in_order_of_ranks": [-2.5, -5.0, -7.5],
    "epochs_from_zero": partial(rates, resumes=False),
    "norms_of_shards_added": [[0.6], [0.8]],
    "infinity_stays_at_its_rank": [[0.0], [1.0]],
    "other_elements_dropped": [0.0] * 16,
    "target_of_batch_before": [[[-8.0]], [[-8.0]]],
    "split_backward_from_ones": [32.0] * 4,
    "first_shard_for_all": [0.0, 1.0, 2.0, 3.0],
    "slices_without_offset": [0.0, 1.0, 2.0, 3.0],
    "average_ends_at_frozen": [[0.5, 0.0, 0.5], [0.5, 1.0, 0.5]],
    "columns_scattered_as_viewed": [[[0.0, 2.0], [8.0, 10.0]], [[4.0, 6.0], [12.0, 14.0]]],
    "gradients_not_sent_back": [[1.0, 3.0], [2.0, 6.0]],
}
"""Answers worked out by hand or by another way of the computation, the same on all ranks."""


if __name__ == "__main__":
    show(__spec__.name, BLIND_TENTH, NUM_RANKS)
