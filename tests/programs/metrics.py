"""Steps that report tensors of a fixed size, and modules that only evaluate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

NUM_KINDS = 2
Batch = dict[str, torch.Tensor]


class Metered(nn.Module):
    """A mean of squares, its sum over each kind of row, the number of rows of each kind, and each row's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> Batch:
        squares = self.layer(x).square().sum(-1)
        of_kind = kind == torch.arange(NUM_KINDS)[:, None]
        sums = torch.where(of_kind, squares, 0).sum(-1)
        return {"loss": squares.mean(), "sums": sums, "counts": of_kind.sum(-1), "squares": squares}


def metered() -> nn.Module:
    return Metered()


class Evaluated(Metered):
    """Computes without gradients."""

    @torch.no_grad()
    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> Batch:
        return super().forward(x, kind)


def evaluated() -> nn.Module:
    return Evaluated()


class Counted(nn.Module):
    """Counts rows of each kind, and has no parameters."""

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> Batch:
        of_kind = kind == torch.arange(NUM_KINDS)[:, None]
        return {"loss": x.detach().mean(), "sums": (of_kind * x.detach().sum(-1)).sum(-1), "counts": of_kind.sum(-1)}


def counted() -> nn.Module:
    return Counted()


class Shifted(nn.Module):
    """Takes each row for the other kind."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> Batch:
        left: Batch = self.module(x, 1 - kind)
        return left


class Followed(nn.Module):
    """Gives a tensor whose first dim is the number of rows plus one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Batch:
        squares = self.layer(x).square().sum(-1)
        return {"loss": squares.mean(), "starts": torch.cumsum(torch.cat([torch.zeros_like(squares[:1]), squares]), 0)}


def followed() -> nn.Module:
    return Followed()


class OfTwoRows(nn.Linear):
    """Takes two rows and no other number."""

    def forward(self, x: torch.Tensor) -> Batch:
        squares = super().forward(x).square().reshape(2, 2).sum(-1)
        return {"loss": squares.mean(), "own": squares}


def of_two_rows() -> nn.Module:
    return OfTwoRows(3, 2)


def replicated(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group())


def same(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return module


def shifted(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return Shifted(module)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.25)


def _shared(module: nn.Module, mesh: DeviceMesh, micro_batches: Sequence[Batch]) -> tuple[Batch, torch.Tensor]:
    """Returns a rank's results, and its share of the rows."""
    (batch,) = micro_batches
    rows = torch.tensor([float(len(batch["x"]))])
    share = rows.clone()
    dist.all_reduce(rows, group=mesh.get_group())
    return module(**batch), (share / rows).squeeze()


def _reported(left: Batch, share: torch.Tensor, mesh: DeviceMesh, summed: Sequence[str]) -> Batch:
    report = {name: each.detach().clone() for name, each in left.items()}
    report["loss"] = (left["loss"] * share).detach()
    for name in ("loss", *summed):
        dist.all_reduce(report[name], group=mesh.get_group())
    return report


def trains(
    module: nn.Module,
    mesh: DeviceMesh,
    micro_batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    summed: Sequence[str] = ("sums", "counts"),
) -> Batch:
    optimizer.zero_grad()
    left, share = _shared(module, mesh, micro_batches)
    (left["loss"] * share * mesh.size()).backward()
    optimizer.step()
    return _reported(left, share, mesh, summed)


REPORTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "float32": lambda tensor: tensor.float(),
    "float64": lambda tensor: tensor.double(),
    "bfloat16": lambda tensor: tensor.bfloat16(),
    "numbers": lambda tensor: tensor if tensor.dim() else tensor.item(),
    "one_element": lambda tensor: tensor if tensor.dim() else tensor.reshape(1),
    "integers": lambda tensor: tensor.int(),
    "doubled": lambda tensor: 2 * tensor.double(),
}


def __getattr__(name: str) -> Callable[..., dict[str, Any]]:
    """The step 'reports_NAME', which reports in another form."""
    reported = REPORTS.get(name.removeprefix("reports_"))
    if reported is None or not name.startswith("reports_"):
        raise AttributeError(name)
    return lambda *args: {key: reported(tensor) for key, tensor in trains(*args).items()}


def trains_twice_as_much(
    module: nn.Module, mesh: DeviceMesh, micro_batches: Sequence[Batch], optimizer: torch.optim.Optimizer
) -> Batch:
    """Trains with twice the gradients of the mean."""
    optimizer.zero_grad()
    left, share = _shared(module, mesh, micro_batches)
    (left["loss"] * share * mesh.size() * 2).backward()
    optimizer.step()
    return _reported(left, share, mesh, ("sums", "counts"))


def trains_with_own_sums(
    module: nn.Module, mesh: DeviceMesh, micro_batches: Sequence[Batch], optimizer: torch.optim.Optimizer
) -> Batch:
    return trains(module, mesh, micro_batches, optimizer, ("counts",))


def trains_with_own_counts(
    module: nn.Module, mesh: DeviceMesh, micro_batches: Sequence[Batch], optimizer: torch.optim.Optimizer
) -> Batch:
    return trains(module, mesh, micro_batches, optimizer, ("sums",))


def evaluates(module: nn.Module, mesh: DeviceMesh, micro_batches: Sequence[Batch], _: None) -> Batch:
    left, share = _shared(module, mesh, micro_batches)
    return _reported(left, share, mesh, ("sums", "counts"))


def evaluates_own_rows(module: nn.Module, mesh: DeviceMesh, micro_batches: Sequence[Batch], _: None) -> Batch:
    (batch,) = micro_batches
    left: Batch = module(**batch)
    return left
