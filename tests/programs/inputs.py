"""Modules with inputs of any kind and outputs of any form, and ways to make them parallel, right and wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

VOCAB, FEATURES = 11, 6


class Looked(nn.Module):
    """Rows of a table, masked, and a linear layer: judged on integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 4)
        self.linear = nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor, *, mask: torch.Tensor, x: torch.Tensor) -> dict[str, Any]:
        rows = self.table(ids).masked_fill(~mask[..., None], 0.0) + x
        return {"logits": self.linear(rows.relu()), "pair": (rows, ids + 1), "nothing": None}


def looked() -> nn.Module:
    return Looked()


def rows_of_the_table(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, {"table": RowwiseParallel(input_layouts=Replicate())})


def ddp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group(), broadcast_buffers=False)


def fsdp2(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(module, mesh=mesh)


def unsynchronized(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallel = ddp(module, mesh)
    parallel.require_backward_grad_sync = False  # type: ignore[assignment]
    return parallel


@dataclass
class Given:
    """The output of a library's model."""

    loss: torch.Tensor | None
    logits: torch.Tensor
    cache: object = None


class Model(nn.Module):
    """Tied, frozen and unused parameters, a norm in float32, a mask of the lowest number, and a loss."""

    counter: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, FEATURES)
        self.places = nn.Embedding(8, FEATURES).requires_grad_(requires_grad=False)
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.query = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, VOCAB, bias=False)
        self.head.weight = self.table.weight
        self.spare = nn.Linear(2, 2)
        self.order = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(FEATURES))

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor | None = None
    ) -> Given:
        x = self.norm(self.table(ids) + self.places(positions))
        lowest = torch.finfo(x.dtype).min
        scores = self.query(x) @ x.transpose(-1, -2)
        scores = scores + (1.0 - mask[:, None].to(x.dtype)) * lowest
        x = scores.softmax(-1) @ x
        self.counter += 1
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean((0, 1))
        logits = self.head(x)
        loss = None if labels is None else functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Given(loss, logits, cache=object())


def model() -> nn.Module:
    return Model()


def model_tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, {"query": ColwiseParallel(output_layouts=Replicate())})


def whole(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return module


def thawed(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Trains frozen parameters, as when a wrapper loses their flags."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_()
    return DistributedDataParallel(
        module, process_group=mesh.get_group(), find_unused_parameters=True, broadcast_buffers=False
    )


def searching(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(
        module, process_group=mesh.get_group(), find_unused_parameters=True, broadcast_buffers=False
    )


def untied(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """One of two tied weights is a copy."""
    head = module.get_submodule("head")
    head.weight = nn.Parameter(head.weight.detach().clone())  # type: ignore[assignment]
    return searching(module, mesh)


def stale(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Resets a buffer to its previous value."""
    before = module.get_buffer("mean").clone()

    def put_back(*_: object) -> None:
        module.get_buffer("mean").copy_(before)

    module.register_forward_hook(put_back)
    return searching(module, mesh)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x)
        return normed


def batch_norm() -> nn.Module:
    return Norm()


def batch_norm_in_eval() -> nn.Module:
    return Norm().eval()


class Router(nn.Module):
    """Each row goes to the one of four experts that it has most of; `.item()` says how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if int((chosen == number).sum().item()):
                output = output.index_add(0, rows, expert(x[rows]) * weights[rows, places, None])
        return output


def router() -> nn.Module:
    return Router()


class Outer(nn.Module):
    """A submodule with a step that cannot be followed, forward or backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.inner(self.first(x))
        return changed


class Decides(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 if x.sum().item() > 0 else 2)


class Squeezed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.hardsigmoid(x)


class TiesAlways(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([x @ x.T, x @ x.T.clone()], -1).exp()
        return both[..., both.sum(0).argmax()]


def decides() -> nn.Module:
    return Outer(Decides())


def squeezed() -> nn.Module:
    return Outer(Squeezed())


def ties() -> nn.Module:
    return Outer(TiesAlways())


class ShapedByValues(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        return x, x[mask]


def shaped_by_values() -> nn.Module:
    return ShapedByValues()


class Flash(nn.Module):
    """Attention that asks for one particular kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return functional.scaled_dot_product_attention(self.linear(x), x, x)


def flash() -> nn.Module:
    return Flash()


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.0, batch_first=True)


def heads() -> nn.Module:
    return nn.MultiheadAttention(FEATURES, 2, batch_first=True)


def cell() -> nn.Module:
    return nn.GRUCell(3, 4)


def lstm() -> nn.Module:
    return nn.LSTM(3, 4, batch_first=True)


def average_over_ranks(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Every rank has everything; the output is averaged over the ranks, which changes nothing."""

    def average(_: nn.Module, __: Any, given: Any) -> Any:
        return _averaged(given, mesh)

    module.register_forward_hook(average)
    return module


def _averaged(given: Any, mesh: DeviceMesh) -> Any:
    if isinstance(given, tuple):
        return tuple(_averaged(each, mesh) for each in given)
    return _Average.apply(given, mesh)


class _Average(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        total = given.clone()
        dist.all_reduce(total, group=mesh.get_group())
        return total / mesh.size()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return cotangent, None
