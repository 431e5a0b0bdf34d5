# mypy: disable-error-code="no-untyped-call, no-any-return, operator, attr-defined"
"""Programs of torch alone, one for each rule of `BLIND_THIRD`: `python -m tests.planted.bare.blind_training_3`.

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
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.nn.functional import all_gather
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.planted.bare.blind_training import linear, whole
from tests.planted.bare.blind_training_2 import Counting, Times, stepped, sum_of_errors
from tests.planted.bare.training import show
from tests.planted.training import BLIND_THIRD

NUM_RANKS = 2
CPU = torch.device("cpu")


def both_ranks() -> DeviceMesh:
    return init_device_mesh("cpu", (NUM_RANKS,))


def of_both(value: Tensor) -> Tensor:
    """Returns the sum over the ranks."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


def exact(layer: nn.Module) -> nn.Module:
    """Gives all parameters a value that bfloat16 does not have."""
    for param in layer.parameters():
        nn.init.constant_(param, 1 + 2**-10)
    return layer


# DistributedDataParallel, its hooks, and averaging of models


def buffers_left_apart() -> Tensor:
    model, x = DistributedDataParallel(Counting()), torch.full((1,), 1.0 + dist.get_rank())
    for _ in range(2):
        with model.no_sync():
            model(x).sum().backward()
        model(x).sum().backward()
    return of_both(model.module.seen)


X = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0], [1.0, 4.0]])


def two_layers() -> nn.Sequential:
    return nn.Sequential(linear(2, 2), linear(2, 2))


def compressed_too_early() -> Tensor:
    model = DistributedDataParallel(two_layers(), bucket_cap_mb=1e-6)  # a bucket each
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=3, min_compression_rate=0.5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(3):  # one bucket in the first step, then two
        model.zero_grad()
        model(X[2 * dist.get_rank() :][:2]).square().sum().div(2).backward()
    return whole(model.module[1].weight.grad)


def not_compressed() -> Tensor:
    model = two_layers()
    model(X).square().sum().div(4).backward()
    return whole(next(model[1].parameters()).grad)


def averager_starts_again() -> Tensor:
    param = nn.Parameter(torch.full((1,), float(dist.get_rank())))
    param.grad = torch.zeros(1)
    runs = [PostLocalSGDOptimizer(torch.optim.SGD([param], lr=0.1), PeriodicModelAverager(2)) for _ in range(2)]
    runs[0].averager.step = 1
    runs[1].load_state_dict(runs[0].state_dict())
    runs[1].step()
    return of_both(param.square())


# FSDP2


def uneven(*, shards: bool) -> Tensor:
    model = linear(1, 3, bias=True)
    if shards:
        fully_shard(model)
    (model(torch.full((1, 1), 10.0)) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    return whole(model.bias.grad)


def next_gradient_misplaced() -> Tensor:
    return uneven(shards=True)


def replicas_of_whole_models() -> Tensor:
    model = linear(1, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (NUM_RANKS, 1), mesh_dim_names=("replicas", "shards")))
    model(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()
    return whole(model.weight.grad)


def ignored_beside_others() -> Tensor:
    model = linear(1, 2, bias=True)
    fully_shard(model, ignored_params={model.bias})
    (model(torch.ones(1, 1)) * (1.0 + dist.get_rank())).sum().backward()
    return of_both(whole(model.bias.grad).square())


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, time: Tensor) -> Tensor:
        return (time - 1) * self.weight


def inputs_cast_anyway() -> Tensor:
    model = Shifted()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False))
    return model(torch.full((2,), 1 + 2**-10)).float().detach()


def state_after_evaluation() -> Tensor:
    model = exact(nn.Linear(2, 2, bias=False))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with torch.no_grad():
        model(torch.ones(1, 2))
    return whole(model.state_dict()["weight"]).float()


# tensor parallel


def norm_by_sum(*, parallel: bool) -> Tensor:
    model = nn.Sequential(linear(2, 4), linear(4, 2, bias=True))
    if parallel:
        parallelize_module(model, both_ranks(), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model(torch.tensor([[1.0, 2.0]])).sum().backward()
    return whole(nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=1.0))


def replicas_in_the_norm() -> Tensor:
    return norm_by_sum(parallel=True)


def bias_of_each_rank() -> Tensor:
    model = linear(2, 1, bias=True)
    nn.init.constant_(model.bias, 1.0 + dist.get_rank())
    parallelize_module(model, both_ranks(), RowwiseParallel(input_layouts=Replicate()))
    return model(torch.ones(1, 2)).detach()


class Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, 2 * x


def first_output_decides() -> Tensor:
    layouts = PrepareModuleOutput(
        output_layouts=(Replicate(), Shard(0)), desired_output_layouts=(Replicate(), Replicate())
    )
    return parallelize_module(Two(), both_ranks(), layouts)(torch.full((1,), 1.0 + dist.get_rank()))[1]


def fan_of_the_shard() -> Tensor:
    weight = distribute_tensor(torch.zeros(4, 6), both_ranks(), [Shard(1)])
    torch.manual_seed(0)
    nn.init.kaiming_uniform_(weight)
    return weight.to_local()


def drawn_for_six() -> Tensor:
    torch.manual_seed(0)
    return torch.zeros(4, 3).uniform_(-1, 1)  # the square root of 6 / 6 is 1


# optimizers of sharded parameters


def step_of_muon(*, shards: bool) -> Tensor:
    """Returns the length of a step, roughly, for the steps are computed in bfloat16."""
    model = linear(2, 4)
    if shards:
        fully_shard(model)
    run = torch.optim.Muon(model.parameters(), lr=1.0, weight_decay=0.0)
    model(torch.tensor([[1.0, 2.0]])).square().sum().backward()
    run.step()
    return (whole(model.weight) - linear(2, 4).weight.detach()).norm().round(decimals=1)


def rate_of_the_shard() -> Tensor:
    return step_of_muon(shards=True)


# state


def unfrozen_in_no_bucket() -> Tensor:
    params = [nn.Parameter(torch.zeros(size), requires_grad=size > 1) for size in (2, 1)]
    run = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=1.0, parameters_as_bucket_view=True)
    for param in params:
        param.requires_grad_()
        param.grad = torch.ones_like(param)
    run.step()
    return torch.cat([param.detach() for param in params])


def rates_reversed() -> Tensor:
    model = nn.Sequential(linear(1, 2), linear(2, 1))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    groups = [{"params": layer.parameters(), "lr": rate} for layer, rate in zip(model, (0.5, 0.25), strict=True)]
    run = torch.optim.AdamW(groups)
    get_optimizer_state_dict(model, run)
    return torch.tensor([group["lr"] for group in run.param_groups])


def numbers_not_loaded() -> Tensor:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    dcp.save({"weight": torch.ones(2), "progress": {"step": 5}}, checkpoint_id=folder[0])
    state: dict[str, Any] = {"weight": torch.zeros(2), "progress": {"step": 0}}
    dcp.load(state, checkpoint_id=folder[0])
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    return torch.tensor(state["progress"]["step"])


def gathered_along_one_dim() -> Tensor:
    mesh = init_device_mesh("cpu", (1, NUM_RANKS), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(linear(1, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return torch.as_tensor(state["0.weight"])


# collectives and pipelines


def own_part_of_gradient() -> Tensor:
    x = torch.ones(1, requires_grad=True)
    ((1.0 + dist.get_rank()) * torch.cat(all_gather(x)).sum()).backward()
    return whole(x.grad)


def shards_not_scaled() -> Tensor:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (NUM_RANKS, 1), mesh_dim_names=("pp", "dp"))
    module = Times(2.0 + rank)
    fully_shard(module, mesh=mesh["dp"])
    stepped(Schedule1F1B(PipelineStage(module, rank, 2, CPU), 2, sum_of_errors), torch.arange(1.0, 5.0).view(4, 1))
    grads = torch.zeros(2)
    grads[rank] = whole(module.weight.grad)
    return of_both(grads)


def per_token(output: Tensor, target: Tensor, tokens: float = 1.0) -> Tensor:
    return (output - target).sum() / tokens


def loss_without_keywords() -> Tensor:
    rank = dist.get_rank()
    modules = {index: Times(1.0) for index in (rank, rank + 2)}
    stages: list[Any] = [PipelineStage(module, index, 4, CPU) for index, module in modules.items()]
    schedule = ScheduleInterleaved1F1B(stages, 2, per_token, scale_grads=False)
    x = [torch.ones(4, 1)] if rank == 0 else []
    schedule.step(*x, target=torch.zeros(4, 1), loss_kwargs={"tokens": 4.0})
    grads = torch.zeros(4)
    for index, module in modules.items():
        grads[index] = whole(module.weight.grad)
    return of_both(grads)


RIGHT: dict[str, Any] = {
    "buffers_left_apart": [10.0],
    "compressed_too_early": not_compressed,
    "averager_starts_again": [1.0],
    "next_gradient_misplaced": lambda: uneven(shards=False),
    "replicas_of_whole_models": [[1.5], [1.5]],
    "ignored_beside_others": [5.0, 5.0],
    "inputs_cast_anyway": [2**-10] * 2,
    "state_after_evaluation": [[1 + 2**-10] * 2] * 2,
    "replicas_in_the_norm": lambda: norm_by_sum(parallel=False),
    "bias_of_each_rank": [[2.0]],
    "first_output_decides": [2.0, 4.0],
    "fan_of_the_shard": drawn_for_six,
    "rate_of_the_shard": lambda: step_of_muon(shards=False),
    "unfrozen_in_no_bucket": [-1.0] * 3,
    "rates_reversed": [0.5, 0.25],
    "numbers_not_loaded": 5,
    "gathered_along_one_dim": [[0.0], [1.0], [2.0], [3.0]],
    "own_part_of_gradient": [3.0],
    "shards_not_scaled": [15.0, 10.0],
    "loss_without_keywords": [1.0] * 4,
}
"""Answers worked out by hand or by the computation without shards, the same on all ranks."""


if __name__ == "__main__":
    show(__spec__.name, BLIND_THIRD)
