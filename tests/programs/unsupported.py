"""Programs that do not support some cases and say so: on all ranks, on some, and at times when they may not."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh

from equivtest import NotSupported
from equivtest.cases.subject import Answers
from equivtest.families.zero3.fetch.case import FetchCase
from tests.programs.audit import without_collectives
from tests.programs.module import ddp, mlp, tensor_parallel, without_relu

ROWS = 4
"""Programs that look at rows do not support inputs with so many rows or more."""


class OfFewRows(NotSupported):
    """A subclass of NotSupported."""


class Foreign(Exception):
    """Another package's, under the same name."""


Foreign.__name__ = Foreign.__qualname__ = "NotSupported"


class Looks(nn.Module):
    """The module that it wraps, once it has looked at x."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] >= ROWS:
            raise OfFewRows(f"{x.shape[0]} rows do not fit")
        found: torch.Tensor = self.inner(x)
        return found


class LooksBackward(torch.autograd.Function):
    """The identity, that refuses in the backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> Any:
        if grad.shape[0] >= ROWS:
            raise NotSupported(f"{grad.shape[0]} rows do not fit")
        return grad


def looking() -> nn.Module:
    """A reference that refuses; a reference defines the computation, so it may not."""
    return Looks(mlp())


class WithLoss(nn.Linear):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": super().forward(x).sum()}


def with_loss() -> nn.Module:
    return WithLoss(3, 2)


def looking_backward() -> nn.Module:
    module = mlp()
    module.register_forward_hook(lambda part, given, found: LooksBackward.apply(found))
    return module


def refusing() -> nn.Module:
    raise NotSupported("no such module today")


def divides(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Right on two ranks, because two divides eight features; three does not."""
    if 8 % mesh.size():
        raise NotSupported(f"8 features do not divide among {mesh.size()} ranks")
    return tensor_parallel(module, mesh)


def replicates_on_two(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """DistributedDataParallel, but not on three ranks."""
    if mesh.size() == 3:
        raise NotSupported("three are one too many")
    return ddp(module, mesh)


def divides_as_rank_0_knows(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The others do not look, and wait for it."""
    return divides(module, mesh) if mesh.get_local_rank() == 0 else tensor_parallel(module, mesh)


def never(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if mesh.size() > 1:
        raise NotSupported("several ranks are for later")
    return module


def of_few_rows(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Right of fewer rows than ROWS; more are refused in the forward."""
    return Looks(tensor_parallel(module, mesh))


def of_few_rows_backward(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The same, in the backward."""
    parallel = tensor_parallel(module, mesh)
    parallel.register_forward_hook(lambda part, given, found: LooksBackward.apply(found))
    return parallel


def one_after_the_other(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each rank refuses alone, the second a while after the first."""
    time.sleep(mesh.get_local_rank())
    raise NotSupported("not today")


def without_a_reason(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    raise NotSupported("")


def at_length(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    raise NotSupported("no heads,\n" * 1_000)


def out_of_step(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The first rank has begun a collective, the others have not."""
    if mesh.get_local_rank() == 0:
        dist.all_reduce(torch.ones(1), group=mesh.get_group(), async_op=True)
    raise NotSupported("not today")


def with_a_foreign_word(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    raise Foreign("not ours")


def wrong_of_two_rows(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Computes a wrong result, but refuses a single row."""

    def refuse(part: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if given[0].shape[0] < 2:
            raise NotSupported("one row is too few")

    parallel = without_relu(module, mesh)
    parallel.register_forward_pre_hook(refuse)
    return parallel


def right(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return tensor_parallel(module, mesh)


def set_up(mesh: DeviceMesh) -> None:
    if mesh.size() == 3:
        raise NotSupported("no groups of three")


def set_up_halfway(mesh: DeviceMesh) -> None:
    """Says so when it has begun, and cannot begin twice."""
    assert not _begun, "begun already"
    _begun.append(mesh)
    raise NotSupported("no groups today")


_begun: list[DeviceMesh] = []


def tear_down(mesh: DeviceMesh) -> None:
    """Nothing was set up."""


def step(
    module: nn.Module,
    mesh: DeviceMesh,
    micro_batches: list[dict[str, torch.Tensor]],
    optimizer: torch.optim.Optimizer | None,
) -> object:
    raise NotSupported("no steps yet")


def where_the_sum_is_another(case: FetchCase, mesh: DeviceMesh, given: Mapping[str, torch.Tensor]) -> Answers:
    """Declines a case if the sum over the ranks is wrong."""
    total = torch.tensor([mesh.get_local_rank() + 1])
    dist.all_reduce(total, group=mesh.get_group())
    if total.item() != mesh.size() * (mesh.size() + 1) // 2:
        raise NotSupported("such a sum")
    return without_collectives(case, mesh, given)
