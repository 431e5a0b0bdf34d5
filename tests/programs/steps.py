"""Steps of training that ranks run, right and wrong, for the tests of modules that are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from equivtest.programs.examples.next_token import NextToken
from equivtest.programs.examples.token_mean import token_mean


def columns_and_rows(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


class Squares(nn.Module):
    """The mean of the squares of a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.inner(x).square().mean()}


def squares() -> nn.Module:
    return Squares()


def small_sgd(module: nn.Module) -> optim.Optimizer:
    return optim.SGD(module.parameters(), 1e-9)


def large_sgd(module: nn.Module) -> optim.Optimizer:
    return optim.SGD(module.parameters(), 0.5)


def frozen_first() -> nn.Module:
    module = perceptron()
    module.get_submodule("0").requires_grad_(requires_grad=False)
    return module


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": lambda p, **how: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1, **how),
    "adam": lambda p, **how: optim.Adam(p, 0.02, weight_decay=0.1, **how),
    "adamw": lambda p, **how: optim.AdamW(p, 0.02, amsgrad=True, **how),
    "adagrad": lambda p, **how: optim.Adagrad(p, 0.02, lr_decay=0.1, **how),
    "rmsprop": lambda p, **how: optim.RMSprop(p, 0.02, centered=True, momentum=0.5, **how),
    "adamax": lambda p, **how: optim.Adamax(p, 0.02, **how),
    "nadam": lambda p, **how: optim.NAdam(p, 0.02, decoupled_weight_decay=True, **how),
    "radam": lambda p, **how: optim.RAdam(p, 0.02, **how),
    "adadelta": lambda p, **how: optim.Adadelta(p, 0.5, **how),
    "asgd": lambda p, **how: optim.ASGD(p, 0.02, **how),
}


def made(name: str, **how: Any) -> Callable[[nn.Module], optim.Optimizer]:
    return lambda module: OPTIMIZERS[name](module.parameters(), **how)


for _name in OPTIMIZERS:
    globals()[_name] = made(_name)
    globals()[f"{_name}_foreach"] = made(_name, foreach=True)
for _name in ("sgd", "adam", "adamw", "adagrad"):
    globals()[f"{_name}_fused"] = made(_name, fused=True)


def adafactor(module: nn.Module) -> optim.Optimizer:
    return optim.Adafactor(module.parameters(), 0.02)  # type: ignore[attr-defined]


def no_optimizer(module: nn.Module) -> nn.Module:
    return module


def tiny(module: nn.Module) -> optim.Optimizer:
    return optim.AdamW(module.parameters(), lr=1e-9)


class Halving(optim.SGD):
    """Halves the update on one rank of a world."""

    def step(self, closure: Any = None) -> Any:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            for group in self.param_groups:
                group["lr"] = 0.05
        return super().step(closure)


def halving(module: nn.Module) -> optim.Optimizer:
    return Halving(module.parameters(), 0.1)


def reports_nothing(*given: Any) -> dict[str, torch.Tensor]:
    token_mean(*given)
    return {}


def large(module: nn.Module) -> optim.Optimizer:
    """Makes so large an update that bfloat16's rounding does not hide it."""
    return optim.SGD(module.parameters(), lr=2.0)


def updates_by_itself(module: Any, mesh: DeviceMesh, micro_batches: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    left = token_mean(module, mesh, micro_batches, optim.SGD(module.parameters(), 0.0))
    for parameter in module.parameters():
        parameter.data = parameter.data + 1
    return left


def freezes(module: Any, mesh: DeviceMesh, micro_batches: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    left = token_mean(module, mesh, micro_batches, optimizer)
    module.get_submodule("module.embedding").requires_grad_(requires_grad=False)
    return left


def adds_much(module: Any, mesh: DeviceMesh, micro_batches: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    left = token_mean(module, mesh, micro_batches, optimizer)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 1
    return left


class WithExtra(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.extra = nn.Parameter(torch.ones(1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self[2](self[1](self[0](x)))
        return output


def with_extra() -> nn.Module:
    return WithExtra()


def extra_divided(module: Any, mesh: DeviceMesh) -> nn.Module:
    """Gives the one row of `extra` to the first rank."""
    columns_and_rows(module, mesh)
    module.extra = nn.Parameter(module.extra.detach().tensor_split(mesh.size())[mesh.get_local_rank()].clone())
    return module


def only_columns(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The second layer has plain parameters, whole."""
    return parallelize_module(module, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})


def frozen() -> nn.Module:
    return perceptron().requires_grad_(requires_grad=False)


class TotalNorm(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        output = super().forward(x)
        return {"y": output, "total_norm": output.norm()}


def with_total_norm() -> nn.Module:
    return TotalNorm(3, 2)


class LossAlone(NextToken):
    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        return super().forward(ids, targets)["loss"]


def loss_alone() -> nn.Module:
    return LossAlone()


def of_everything(module: nn.Module) -> optim.Optimizer:
    return optim.SGD(module.parameters(), 0.1)


def lbfgs(module: nn.Module) -> optim.Optimizer:
    return optim.LBFGS(module.parameters())
