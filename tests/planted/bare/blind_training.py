"""Programs of torch alone, one for each rule of `BLIND`: `python -m tests.planted.bare.blind_training`.

It runs each program with its rule and without it, and prints both answers. It fails if they are equal on all ranks, or
if the answer without the rule differs from `RIGHT`. Names of rules as arguments choose some of them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler, swa_utils

from tests.planted.bare.training import show, trained
from tests.planted.training import BLIND

NUM_RANKS = {"shards_joined_in_order": 4, "divided_by_shards_only": 4}
"""Numbers of ranks that show a rule, if two do not."""


def linear(*shape: int, bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """A layer whose weights count up."""
    layer = nn.Linear(*shape, bias=bias, dtype=dtype)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.arange(param.numel(), dtype=dtype).view_as(param))
    return layer


def whole(grad: Tensor | None) -> Tensor:
    if grad is None:
        return torch.zeros(1)
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().clone()


def eps_corrected_too() -> Tensor:
    return trained(torch.optim.Adam, steps=1, lr=0.5, eps=0.5, foreach=False)


def late_parameter_restarts_all() -> Tensor:
    early, late = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    run = torch.optim.SGD([early, late], lr=1.0, momentum=0.5, foreach=True)
    for step in range(3):
        early.grad = torch.ones(1)
        late.grad = torch.ones(1) if step else None
        run.step()
    return torch.cat([early, late]).detach()


def step_back_not_zeroed() -> Tensor:
    param = nn.Parameter(torch.zeros(2))
    run = torch.optim.Rprop([param], lr=1.0, foreach=False)
    for grad in ([1.0, 1.0], [-1.0, 1.0], [-1.0, 1.0]):
        param.grad = torch.tensor(grad)
        run.step()
    return param.detach()


def gradients_overwritten() -> Tensor:
    model = linear(2, 1)
    run = torch.optim.Adamax(model.parameters(), lr=0.5, foreach=True)
    for _ in range(2):  # the second gradient is added to the first
        model(torch.tensor([[-1.0, 2.0]])).sum().backward()
        run.step()
    return torch.cat([model.weight.detach(), whole(model.weight.grad)])


def clipped(max_norm: float) -> Tensor:
    model = linear(2, 1)
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return whole(model.weight.grad)


def generator_used_up() -> Tensor:
    return clipped(1.0)


def small_norm_scaled_up() -> Tensor:
    return clipped(10.0)


def final_model_of_last_rank() -> Tensor:
    model = DistributedDataParallel(linear(1, 1))
    run = torch.optim.SGD(model.parameters(), lr=1.0)
    with model.join():
        for _ in range(1 if dist.get_rank() else 3):
            run.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            run.step()
    return next(model.parameters()).detach()


def frozen_of_each_rank() -> Tensor:
    layers = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer in layers:
        nn.init.constant_(layer.weight, 1.0 + dist.get_rank())
    layers[0].requires_grad_(requires_grad=False)
    return DistributedDataParallel(layers)(torch.ones(1, 1)).detach()


def uncompressed_not_averaged() -> Tensor:
    model = DistributedDataParallel(linear(8, 8, bias=True))
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        model.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
    return whole(model.module.bias.grad)


def gradient_cut_along_rows() -> Tensor:
    model = linear(4, 2)
    fully_shard(model, shard_placement_fn=lambda param: Shard(1))
    (model(torch.tensor([[1.0, 2.0, 3.0, 4.0]])) * torch.tensor([1.0, 10.0])).sum().backward()
    return whole(model.weight.grad)


def reduced_in_few_bits() -> Tensor:
    model = linear(1, 2)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    model(torch.full((1, 1), 1.0 + dist.get_rank() / 128)).sum().backward()
    return whole(model.weight.grad)


def shards_joined_in_order() -> Tensor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(linear(1, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return whole(model[0].weight)


def unfrozen_stays_frozen() -> Tensor:
    model = nn.Sequential(linear(1, 2), linear(2, 2))
    model[0].requires_grad_(requires_grad=False)
    fully_shard(model)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        model[0].requires_grad_(requires_grad=True)
    return whole(model[0].weight.grad)


def divided_by_shards_only() -> Tensor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = linear(1, 2, dtype=torch.float64)
    fully_shard(model, mesh=mesh)
    model(torch.full((1, 1), 1.0 + dist.get_rank(), dtype=torch.float64)).sum().backward()
    return whole(model.weight.grad)


def frozen_trains() -> Tensor:
    model = nn.Sequential(linear(1, 2), linear(2, 2))
    model[0].requires_grad_(requires_grad=False)
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(output_layouts=Shard(0))})
    frozen = model[0].weight
    run = torch.optim.SGD([param for param in model[0].parameters() if param.requires_grad] or [torch.zeros(1)], lr=1.0)
    output = model[0](torch.ones(2, 1))
    if output.requires_grad:
        output.sum().backward()
    run.step()
    return whole(frozen)


def ignored_targets_counted() -> Tensor:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], [3.0, 1.0, 2.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    local = distribute_tensor(logits, init_device_mesh("cpu", (2,)), [Shard(1)]).requires_grad_()
    with loss_parallel():
        nn.functional.cross_entropy(local, torch.tensor([1, -100, 2])).backward()
    return whole(local.grad)


def scheduled_rate_lost() -> Tensor:
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    run = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=1.0)
    scheduler = lr_scheduler.ExponentialLR(run, gamma=0.5)
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        run.step()
        scheduler.step()
    return torch.cat(params).detach()


def patience_one_short() -> Tensor:
    run = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, seen = lr_scheduler.ReduceLROnPlateau(run, factor=0.5, patience=1), []
    for loss in (3.0, 3.0, 2.0, 2.0, 2.0):
        scheduler.step(loss)
        seen.append(run.param_groups[0]["lr"])
    return torch.tensor(seen)


def step_loaded_in_few_bits() -> Tensor:
    param = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    run = torch.optim.Adam([param])
    for _ in range(257):
        param.grad = torch.ones_like(param)
        run.step()
    resumed = torch.optim.Adam([param])
    resumed.load_state_dict(copy.deepcopy(run.state_dict()))
    resumed.step()
    return resumed.state[param]["step"]


def buffers_of_first_model() -> Tensor:
    model = nn.BatchNorm1d(1)
    mean = swa_utils.AveragedModel(model)
    for _ in range(2):
        model(torch.tensor([[1.0], [3.0]]))
        mean.update_parameters(model)
    return mean.module.running_mean.clone()


RIGHT: dict[str, Any] = {
    "eps_corrected_too": [[2 / 3, -2.4], [10 / 3, 1 / 14], [0.0, 4.4]],
    "gradients_overwritten": [[0.881579, 0.118421], [-2.0, 4.0]],
    "ignored_targets_counted": [
        [0.016029, -0.456428, 0.118441, 0.321957], [0.0] * 4, [0.087439, 0.087439, -0.262317, 0.087439],
    ],
    "late_parameter_restarts_all": [-3.25, -1.5],
    "step_back_not_zeroed": [-0.5, -3.64],
    "generator_used_up": [[0.6, 0.8]],
    "small_norm_scaled_up": [[3.0, 4.0]],
    "final_model_of_last_rank": [[-2.0]],
    "frozen_of_each_rank": [[1.0]],
    "uncompressed_not_averaged": [1.0] * 8,
    "gradient_cut_along_rows": [[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]],
    "reduced_in_few_bits": [[1.00390625]] * 2,
    "shards_joined_in_order": [[0.0], [1.0], [2.0], [3.0]],
    "unfrozen_stays_frozen": [[2.0], [4.0]],
    "divided_by_shards_only": [[2.5]] * 2,
    "frozen_trains": [[0.0], [1.0]],
    "scheduled_rate_lost": [-1.75] * 3,
    "patience_one_short": [1.0, 1.0, 1.0, 1.0, 0.5],
    "step_loaded_in_few_bits": 258.0,
    "buffers_of_first_model": [0.38],
}  # fmt: skip
"""Answers worked out by hand, the same on all ranks."""


if __name__ == "__main__":
    show(__spec__.name, BLIND, NUM_RANKS)
