"""A training step: two micro-batches on each rank, then one update.  Replace the functions by yours."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import equivtest as eq


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - y).square().mean()}


def replicate(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return module


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.25)


def step(
    module: nn.Module, mesh: DeviceMesh, micro_batches: list[dict[str, torch.Tensor]], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    rows = torch.tensor(float(sum(len(batch["x"]) for batch in micro_batches)))
    dist.all_reduce(rows, group=mesh.get_group())
    losses = []
    optimizer.zero_grad()
    for batch in micro_batches:
        part = module(**batch)["loss"] * len(batch["x"]) / rows
        part.backward()
        losses.append(part.detach())
    loss = torch.stack(losses).sum()
    for each in (loss, *(parameter.grad for parameter in module.parameters())):
        dist.all_reduce(each, group=mesh.get_group())
    optimizer.step()
    return {"loss": loss}


test_step = eq.program(
    Net,
    replicate,
    inputs={"x": eq.real(("batch", 3)), "y": eq.real(("batch", 2))},
    sizes={"batch": (8, 16)},
    batch="parts of the whole",
    training=eq.Training(optimizer=sgd, step=step, micro_batches=2),
)
