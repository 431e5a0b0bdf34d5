"""Programs of torch alone, for rules of `LATER`: `python -m tests.planted.bare.training`.

It runs each program on two ranks, with its rule and without it, and prints both answers. It fails if they are equal on
all ranks.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint

from tests.planted.bare import join
from tests.planted.training import WRONG, WrongRule, planted

NUM_RANKS = 2


def trained(optimizer: Callable[..., torch.optim.Optimizer], steps: int = 3, **options: Any) -> Tensor:
    param = nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 0.5], [0.25, 4.0]]))
    run = optimizer([param], **options)
    for step in range(steps):
        param.grad = torch.tensor([[1.0, 2.0], [-1.0, 3.0], [0.5, -2.0]]) * (step + 1)
        run.step()
    return param.detach()


def skipped_step() -> Tensor:
    param, scaler = nn.Parameter(torch.tensor([1.0])), torch.amp.GradScaler("cpu", init_scale=1.0)
    run = torch.optim.Adam([param], fused=True)
    scaler.scale(param.sum())
    for grad in (float("inf"), 1.0):
        param.grad = torch.tensor([grad])
        scaler.step(run)
        scaler.update()
    return run.state[param]["step"]


def clipped(by: Callable[..., Any], *values: Any) -> Tensor:
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    params[0].grad, params[1].grad = torch.tensor([-3.0, 1.0]), torch.tensor([2.0])
    by(params, *values)
    return torch.cat([param.grad for param in params if param.grad is not None])


def infinite_shard() -> Tensor:
    model, scaler = nn.Linear(1, 2, bias=False), torch.amp.GradScaler("cpu", init_scale=1.0)
    fully_shard(model)
    nn.init.ones_(model.weight)
    run = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.scale(model(torch.ones(1, 1)).sum()).backward()
    grad = model.weight.grad
    assert isinstance(grad, DTensor)
    grad.to_local().fill_(float("inf") if dist.get_rank() == 0 else 1.0)
    scaler.step(run)
    return model.weight.full_tensor().detach()


def rates(schedule: Callable[[torch.optim.Optimizer], Any]) -> list[float]:
    run = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, seen = schedule(run), []
    for _ in range(5):
        seen.append(run.param_groups[0]["lr"])
        run.step()
        scheduler.step()
    return seen


def warm_up(run: torch.optim.Optimizer) -> Any:
    return lr_scheduler.LinearLR(run, start_factor=0.5, total_iters=2)


def two_schedules(run: torch.optim.Optimizer) -> Any:
    second = lr_scheduler.LinearLR(run, start_factor=0.5, total_iters=2)
    return lr_scheduler.SequentialLR(run, [lr_scheduler.ExponentialLR(run, gamma=0.5), second], milestones=[2])


def averaged() -> Tensor:
    model = nn.Linear(1, 1, bias=False)
    mean = swa_utils.AveragedModel(model)
    for value in (1.0, 2.0, 6.0):
        nn.init.constant_(model.weight, value)
        mean.update_parameters(model)
    return next(mean.module.parameters()).detach()


def averaged_over_ranks() -> Tensor:
    params = [nn.Parameter(torch.full((1,), float(dist.get_rank()))) for _ in range(2)]
    local = torch.optim.SGD([{"params": [param]} for param in params], lr=0.0)
    run = PostLocalSGDOptimizer(local, PeriodicModelAverager(period=2))
    for param in params:
        param.grad = torch.zeros(1)
    run.step()
    return torch.cat([param.detach() for param in params])


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.detach().sum()
        return x * self.weight * self.seen


def buffers() -> Tensor:
    model = DistributedDataParallel(Counting())
    for _ in range(2):
        model(torch.ones(1) * (1 + dist.get_rank())).sum().backward()
    return model.module.seen


def uneven() -> Tensor:
    model = nn.Linear(1, 3, bias=False)
    fully_shard(model)
    nn.init.ones_(model.weight)
    run = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        run.zero_grad()
        output = model(torch.ones(1, 1))
        output.sum().backward()
        run.step()
    return output.detach()


def divided_by_six() -> Tensor:
    model = nn.Linear(1, 2, bias=False, dtype=torch.float64)
    fully_shard(model)
    model.set_gradient_divide_factor(6.0)
    model(torch.full((1, 1), 6.0, dtype=torch.float64)).sum().backward()
    grad = model.weight.grad
    assert isinstance(grad, DTensor)
    return grad.full_tensor()


def sequence_parallel_norm() -> Tensor:
    mesh = init_device_mesh("cpu", (1, NUM_RANKS), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.LayerNorm(2))
    parallelize_module(model, mesh["tp"], {"0": SequenceParallel(sequence_dim=0, use_local_output=True)})
    fully_shard(model, mesh=mesh["dp"])
    model(torch.tensor([[1.0, 3.0 + dist.get_rank()]])).sum().backward()
    grad = next(model.parameters()).grad
    assert isinstance(grad, DTensor)
    return model[0].bias.grad.to_local()


def recomputed(*, use_reentrant: bool = False) -> Tensor:
    torch.manual_seed(0)
    x = torch.ones(16, requires_grad=True)
    out = checkpoint(nn.functional.dropout, x, use_reentrant=use_reentrant)
    out.sum().backward()
    return x.grad - out.detach()


def state_made() -> Tensor:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.5))
    return model.weight.detach()


SHOWN: dict[str, Callable[[], Any]] = {
    "mean_without_decay": partial(trained, torch.optim.RMSprop, centered=True, weight_decay=0.5, foreach=False),
    "eps_left_out": partial(trained, torch.optim.RAdam, lr=1.0, eps=0.5, steps=8, foreach=True),
    "momentum_of_this_step": partial(trained, torch.optim.NAdam, lr=1.0, momentum_decay=1.0, foreach=True),
    "power_of_the_step": partial(trained, torch.optim.ASGD, lr=0.5, lambd=0.5, foreach=True),
    "decay_by_adjusted_rate": partial(trained, torch.optim.Muon, lr=0.5, weight_decay=0.5),
    "skipped_step_counted": skipped_step,
    "clipped_from_above": partial(clipped, nn.utils.clip_grad_value_, 1.5),
    "root_of_largest": partial(clipped, nn.utils.clip_grad_norm_, 1.0, float("inf")),
    "infinity_of_one_rank": infinite_shard,
    "milestone_steps": partial(rates, two_schedules),
    "warm_up_ends_early": partial(rates, warm_up),
    "newest_counts_twice": averaged,
    "averaged_per_group": averaged_over_ranks,
    "reassigned_buffers": buffers,
    "padded_again": uneven,
    "factor_rounded_down": divided_by_six,
    "partial_stays_partial": sequence_parallel_norm,
    "new_random_numbers": recomputed,
    "decayed_by_initialization": state_made,
}


def compared(name: str, program: Callable[[], Any], rule: WrongRule) -> Tensor:
    """Prints the answers without the rule and with it, and returns the first. They differ on some rank."""
    right = torch.as_tensor(program())
    with planted(rule):
        wrong = torch.as_tensor(program())
    print(f"{name} on rank {dist.get_rank()}: {right.tolist()}, with the rule {wrong.tolist()}", flush=True)
    is_same = torch.tensor(int(torch.equal(right, wrong)))
    dist.all_reduce(is_same, dist.ReduceOp.MIN)
    assert not is_same, f"{name} changes nothing on any rank"
    return right


def show(module: str, rules: Mapping[str, WrongRule], num_ranks: Mapping[str, int] | None = None) -> None:
    """Runs the programs of a module with their rules and without, and compares the right answers with its `RIGHT`.

    Names of rules as arguments of the command choose some of them.

    Args:
        num_ranks: Number of ranks of a program, if not two.
    """
    names = sys.argv[1:] or list(rules)
    for size in (NUM_RANKS, 4):
        chosen = {name: rules[name] for name in names if (num_ranks or {}).get(name, NUM_RANKS) == size}
        if chosen:
            with tempfile.TemporaryDirectory() as folder:
                torch.multiprocessing.spawn(_show, (size, folder, module, chosen), nprocs=size)


def _show(rank: int, num_ranks: int, folder: str, module: str, rules: Mapping[str, WrongRule]) -> None:
    programs = importlib.import_module(module)
    join(rank, num_ranks, folder)
    for name, rule in rules.items():
        right, expected = compared(name, getattr(programs, name), rule), programs.RIGHT[name]
        expected = expected() if callable(expected) else expected
        torch.testing.assert_close(right, torch.as_tensor(expected, dtype=right.dtype))
    dist.destroy_process_group()


def _show_later(rank: int, folder: str) -> None:
    join(rank, NUM_RANKS, folder)
    for name, program in SHOWN.items():
        compared(name, program, WRONG[name])
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as store:
        torch.multiprocessing.spawn(_show_later, (store,), nprocs=NUM_RANKS)
