# mypy: disable-error-code="no-untyped-call, no-any-return, operator, attr-defined"
"""Programs of torch alone, one for each rule of `BLIND_AGAIN`: `python -m tests.planted.bare.blind_training_2`.

It runs each program with its rule and without it, and prints both answers. It fails if they are equal on all ranks, or
if the answer without the rule differs from `RIGHT`. Names of rules as arguments choose some of them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.distributed.tensor.parallel import PrepareModuleInput, SequenceParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.planted.bare.blind_training import linear, whole
from tests.planted.bare.training import show
from tests.planted.training import BLIND_AGAIN

NUM_RANKS = {"smallest_period_wins": 4, "wrong_piece_after_forward": 4}
"""Numbers of ranks that show a rule, if two do not."""

CPU = torch.device("cpu")


def both_ranks() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


# optimizers


def history_out_of_step() -> Tensor:
    param = nn.Parameter(torch.ones(2))
    run = torch.optim.LBFGS([param], lr=0.5, max_iter=4, history_size=1)

    def loss() -> Tensor:
        run.zero_grad()
        loss = (param**4 * torch.tensor([1.0, 2.0])).sum()
        loss.backward()
        return loss

    run.step(loss)
    return param.detach()


def with_memory_of_one() -> Tensor:
    """Returns the answer of `history_out_of_step` by the formula for a memory of one step."""
    factor, x = torch.tensor([4.0, 8.0]), torch.ones(2)
    grad = factor * x**3
    step = -grad * 0.5 / grad.abs().sum()
    for _ in range(3):
        x, before = x + step, grad
        grad = factor * x**3
        y = grad - before
        curvature = y.dot(step)
        q = -grad
        first = step.dot(q) / curvature
        r = (q - first * y) * curvature / y.dot(y)
        step = 0.5 * (r + step * (first - y.dot(r) / curvature))
    return x + step


def repeated_rows_apart() -> Tensor:
    table = nn.Embedding(3, 1, sparse=True, _weight=torch.zeros(3, 1))
    run = torch.optim.Adagrad(table.parameters(), lr=1.0)
    table(torch.tensor([0, 0, 2])).sum().backward()
    run.step()
    return table.weight.detach()


def adafactor(*, foreach: bool) -> Tensor:
    param = nn.Parameter(torch.ones(4, 2))
    run = torch.optim.Adafactor([param], lr=1.0, weight_decay=0.0, foreach=foreach)
    param.grad = torch.arange(1.0, 9.0).view(4, 2)
    run.step()
    return param.detach()


def columns_divided_by_rows() -> Tensor:
    return adafactor(foreach=True)


def last_dtype_zeroed() -> Tensor:
    params = [nn.Parameter(torch.ones(1, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    run = torch.optim.SGD(params, lr=1.0, foreach=True)
    for param in params:
        param.grad = torch.ones_like(param)
    run.zero_grad(set_to_none=False)
    return torch.cat([whole(param.grad).float() for param in params])


# scaler and autocast


def unscaled_again() -> Tensor:
    param, scaler = nn.Parameter(torch.ones(1)), torch.amp.GradScaler("cpu", init_scale=4.0)
    run = torch.optim.SGD([param], lr=1.0, fused=True)
    scaler.scale((2 * param).sum()).backward()
    scaler.unscale_(run)
    scaler.step(run)
    return param.detach()


def first_optimizer_decides() -> Tensor:
    params, scaler = [nn.Parameter(torch.ones(1)) for _ in range(2)], torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizers = [torch.optim.SGD([param], lr=1.0) for param in params]
    scaler.scale(params[0] + params[1] * float("inf")).backward()
    for run in optimizers:
        scaler.step(run)
    scaler.update()
    return torch.tensor(scaler.get_scale())


def inner_autocast_remains() -> Tensor:
    x, one = torch.tensor([[1 + 2**-10]]), torch.ones(1, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.autocast("cpu", dtype=torch.float16):
            one @ one
        return (x @ one).float()


# recomputation


def recomputed_in_default_dtype() -> Tensor:
    x, weight = torch.tensor([[1 + 2**-10]], requires_grad=True), nn.Parameter(torch.ones(1, 1))
    with torch.autocast("cpu", dtype=torch.float16):
        y = checkpoint(lambda x: x @ weight, x, use_reentrant=True)
    y.float().sum().backward()
    return whole(weight.grad)


def last_functions_left_out() -> Tensor:
    x = torch.ones(1, requires_grad=True)
    y = checkpoint_sequential([lambda x: 2 * x] * 5, 2, x, use_reentrant=False)
    y.sum().backward()
    return torch.cat([y.detach(), whole(x.grad)])


# schedules and averages


def rates(rate: float | Tensor, schedule: Callable[[torch.optim.Optimizer], Any], steps: int) -> Tensor:
    run = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler, seen = schedule(run), []
    for _ in range(steps):
        seen.append(float(run.param_groups[0]["lr"]))
        run.step()
        scheduler.step()
    return torch.tensor(seen)


def initial_rate_changes() -> Tensor:
    def warm_up(run: torch.optim.Optimizer) -> Any:
        first = lr_scheduler.LinearLR(run, start_factor=0.5, total_iters=2)
        return lr_scheduler.SequentialLR(run, [first, lr_scheduler.LambdaLR(run, lambda _: 1.0)], milestones=[2])

    return rates(torch.tensor(1.0), warm_up, 4)


def third_cycle_as_second() -> Tensor:
    return rates(1.0, lambda run: lr_scheduler.CosineAnnealingWarmRestarts(run, T_0=1, T_mult=2), 8)


def momentum_of_layer_kept() -> Tensor:
    model = nn.BatchNorm1d(1)
    swa_utils.update_bn([torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0]])], model)
    assert isinstance(model.running_mean, Tensor)
    return model.running_mean.clone()


def smallest_period_wins() -> Tensor:
    param = nn.Parameter(torch.full((1,), float(dist.get_rank())))
    param.grad = torch.zeros(1)
    averager = HierarchicalModelAverager(period_group_size_dict=OrderedDict([(2, 2), (4, 4)]))
    averager.average_parameters([param])
    return param.detach()


# DistributedDataParallel


class Counting(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().sum()
        return x * self.weight


def buffers_of_joined_rank() -> Tensor:
    model = DistributedDataParallel(Counting())
    with model.join():
        for _ in range(1 if dist.get_rank() else 4):
            model(torch.full((1,), 1.0 + dist.get_rank())).sum().backward()
    return model.module.seen.clone()


def ignored_buffers_broadcast() -> Tensor:
    module = Counting()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["seen"])
    model = DistributedDataParallel(module)
    for _ in range(2):
        model(torch.full((1,), 1.0 + dist.get_rank())).sum().backward()
    of_both = module.seen.clone()
    dist.all_reduce(of_both)
    return of_both


# FSDP2


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return x * self.weight * scale


def keywords_not_cast() -> Tensor:
    model = Scaled()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return model(torch.ones(2), scale=torch.full((2,), 1 + 2**-8)).float().detach()


def hooks_of_first_gradient() -> Tensor:
    model = linear(1, 2)
    fully_shard(model)
    run = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(_: Tensor) -> None:
        run.step()
        run.zero_grad(set_to_none=False)

    model.weight.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
    return whole(model.weight)


def assigned_after_forward() -> Tensor:
    model = linear(1, 2)
    fully_shard(model)
    model(torch.ones(1, 1)).sum().backward()
    loaded = {name: 10 * value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(loaded, assign=True)
    return model(torch.ones(1, 1)).detach()


def wrong_piece_after_forward() -> Tensor:
    model = nn.Sequential(linear(2, 4), linear(4, 1))
    fully_shard(model[0], reshard_after_forward=2)
    fully_shard(model)
    x = torch.ones(1, 2, requires_grad=True)
    model(x).sum().backward()
    return whole(x.grad)


def counted_in_next_step() -> Tensor:
    model = linear(1, 2)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    for _ in range(2):
        model.zero_grad()
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            model(torch.ones(1, 1)).sum().backward()
    return whole(model.weight.grad)


# tensor, sequence and context parallel


class SumOfRows(nn.Module):
    def forward(self, *, rows: Tensor) -> Tensor:
        return rows.sum(0)


def keyword_stays_local() -> Tensor:
    layouts = PrepareModuleInput(
        input_kwarg_layouts={"rows": Shard(0)},
        desired_input_kwarg_layouts={"rows": Replicate()},
        use_local_output=True,
    )
    model = parallelize_module(SumOfRows(), both_ranks(), layouts)
    return model(rows=torch.full((1, 1), 1.0 + dist.get_rank()))


LOGITS = torch.tensor([[0.0, 1.0, 2.0, 3.0], [3.0, 1.0, 2.0, 0.0], [0.0, 0.0, 1.0, 0.0]])


def weighted_loss(logits: Tensor) -> Tensor:
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return nn.functional.cross_entropy(logits, torch.tensor([1, -100, 2]), weight)


def weight_of_ignored_targets() -> Tensor:
    local = distribute_tensor(LOGITS, both_ranks(), [Shard(1)])
    with loss_parallel():
        return whole(weighted_loss(local))


def replicated_input_stays_so() -> Tensor:
    mesh = both_ranks()
    model = parallelize_module(nn.LayerNorm(2), mesh, SequenceParallel(use_local_output=True))
    x = distribute_tensor(torch.arange(8.0).view(1, 4, 2), mesh, [Replicate()])
    return torch.tensor(model(x).shape)


def first_row_restored() -> Tensor:
    mesh, x = both_ranks(), torch.arange(16.0).view(2, 8)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        return context_parallel_unshard(mesh, [10 * x], [1])[0]


# distributed checkpoint


def options_by_position() -> Tensor:
    model = nn.Sequential(linear(1, 1), linear(1, 1))
    first, second = ({"params": layer.parameters(), "lr": lr} for layer, lr in zip(model, (0.1, 0.2), strict=True))
    state = get_optimizer_state_dict(model, torch.optim.SGD([first, second], momentum=0.5))
    other = torch.optim.SGD([{"params": layer.parameters()} for layer in (model[1], model[0])], lr=1.0, momentum=0.5)
    set_optimizer_state_dict(model, other, state)
    return torch.tensor([group["lr"] for group in other.param_groups])


def read_from_the_beginning() -> Tensor:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    dcp.save({"weight": torch.arange(4.0)}, checkpoint_id=folder[0])
    loaded = distribute_tensor(torch.zeros(4), both_ranks(), [Shard(0)])
    dcp.load({"weight": loaded}, checkpoint_id=folder[0])
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    return whole(loaded)


# ZeroRedundancyOptimizer


def new_group_in_no_bucket() -> Tensor:
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    run = ZeroRedundancyOptimizer(params[:1], torch.optim.SGD, lr=1.0, parameters_as_bucket_view=True)
    run.add_param_group({"params": params[1:]})
    for param in params:
        param.grad = torch.ones_like(param)
    run.step()
    return torch.cat([param.detach() for param in params])


# pipeline schedules


class Times(nn.Module):
    """Multiplies by its weight `times` times."""

    def __init__(self, weight: float, times: int = 1) -> None:
        super().__init__()
        self.weight, self.times = nn.Parameter(torch.full((1, 1), weight)), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x @ self.weight
        return x


def sum_of_errors(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).sum()


def stepped(schedule: Any, x: Tensor) -> Any:
    """Gives the first rank the input and the last the target."""
    if dist.get_rank() == 0:
        return schedule.step(x, target=torch.zeros_like(x))
    return schedule.step(target=torch.zeros_like(x))


def sum_divided_anyway() -> Tensor:
    rank = dist.get_rank()
    module = Times(2.0 + rank)
    schedule = Schedule1F1B(PipelineStage(module, rank, 2, CPU), 2, sum_of_errors, scale_grads=False)
    stepped(schedule, torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    grads = torch.zeros(2)
    grads[rank] = whole(module.weight.grad)
    dist.all_reduce(grads)
    return grads


def shared_weight_counted_twice() -> Tensor:
    rank = dist.get_rank()
    modules = {index: Times(1.0, times=2) for index in (rank, rank + 2)}
    stages: list[Any] = [PipelineStage(module, index, 4, CPU) for index, module in modules.items()]
    stepped(ScheduleInterleavedZeroBubble(stages, 4, sum_of_errors, scale_grads=False), torch.ones(4, 1))
    grads = torch.zeros(4)
    for index, module in modules.items():
        grads[index] = whole(module.weight.grad)
    dist.all_reduce(grads)
    return grads


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def outputs_joined_along_rows() -> Tensor:
    spec: Any = TensorChunkSpec(1)
    stage = PipelineStage(Doubled(), dist.get_rank(), 2, CPU)
    schedule = ScheduleGPipe(stage, 2, args_chunk_spec=(spec,), output_merge_spec=spec)
    x = torch.arange(4.0).view(1, 4)
    output = schedule.step(x) if dist.get_rank() == 0 else schedule.step()
    shape = torch.zeros(2, dtype=torch.int64) if output is None else torch.tensor(output.shape)
    dist.broadcast(shape, src=1)
    return shape


RIGHT: dict[str, Any] = {
    "history_out_of_step": with_memory_of_one,
    "repeated_rows_apart": [[-1.0], [0.0], [-1.0]],
    "columns_divided_by_rows": lambda: adafactor(foreach=False),
    "last_dtype_zeroed": [0.0, 0.0],
    "unscaled_again": [-1.0],
    "first_optimizer_decides": 2.0,
    "inner_autocast_remains": [[1.0]],
    "recomputed_in_default_dtype": [[1 + 2**-10]],
    "last_functions_left_out": [32.0, 32.0],
    "initial_rate_changes": [0.5, 0.75, 1.0, 1.0],
    "third_cycle_as_second": [1.0, 1.0, 0.5, 1.0, 0.853553, 0.5, 0.146447, 1.0],
    "momentum_of_layer_kept": [4.0],
    "smallest_period_wins": [1.5],
    "buffers_of_joined_rank": [4.0],
    "ignored_buffers_broadcast": [6.0],
    "keywords_not_cast": [1.0, 1.0],
    "hooks_of_first_gradient": [[-2.0], [-1.0]],
    "assigned_after_forward": [[1.0, 11.0]],
    "wrong_piece_after_forward": [[28.0, 34.0]],
    "counted_in_next_step": [[2.0]] * 2,
    "keyword_stays_local": [3.0],
    "weight_of_ignored_targets": lambda: weighted_loss(LOGITS),
    "replicated_input_stays_so": [1, 2, 2],
    "first_row_restored": (10 * torch.arange(16.0)).view(2, 8).tolist(),
    "options_by_position": [0.2, 0.1],
    "read_from_the_beginning": [0.0, 1.0, 2.0, 3.0],
    "new_group_in_no_bucket": [-1.0] * 3,
    "sum_divided_anyway": [30.0, 20.0],
    "shared_weight_counted_twice": [8.0] * 4,
    "outputs_joined_along_rows": [1, 4],
}  # fmt: skip
"""Answers worked out by hand or by another way of the computation, the same on all ranks."""


if __name__ == "__main__":
    show(__spec__.name, BLIND_AGAIN, NUM_RANKS)
