"""Users' layers that end in one operator on DTensors, on ranks whose torch may have a wrong rule for that operator.

A layer multiplies x by its weight, then applies the operator.  It is parallelized by columns (the product is Shard(1)),
by rows (the product is Partial) or by batch (the product is Shard(0)).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from equivtest.cases.subject import Answers, Given
from equivtest.programs.case import ModuleCase
from equivtest.programs.run.module import module
from tests.planted.rules import WRONG, planted

SIZE = 4

STYLES: dict[str, tuple[Placement, Placement]] = {
    "columns": (Replicate(), Shard(1)),
    "rows": (Shard(1), Shard(0)),
    "batch": (Shard(0), Replicate()),
}
"""Style -> placements of x and of the weight."""

Last = Callable[[Any], Any]
"""Computes the layer's output from the product."""


def _like(h: torch.Tensor, plain: torch.Tensor) -> Any:
    if not isinstance(h, DTensor):
        return plain
    return DTensor.from_local(plain, h.device_mesh, [Replicate()], run_check=False)


def _added_in_place(h: torch.Tensor) -> Any:
    return _like(h, torch.ones(SIZE)).expand(h.shape).clone().add_(h)


LAYERS: dict[str, tuple[str, Last]] = {
    "magnitude_of_shares": ("rows", torch.abs),
    "relu_of_shares": ("rows", torch.relu),
    "root_of_shares": ("rows", lambda h: h**2),
    "product_of_shares": ("rows", lambda h: h * h),
    "sigmoid_of_shares": ("rows", torch.sigmoid),
    "matrices_of_shares": ("rows", lambda h: h @ h.T),
    "larger_of_sums": ("rows", lambda h: torch.maximum(h, -h)),
    "product_added_up": ("columns", lambda h: h.prod(-1)),
    "sums_averaged_by_rule": ("columns", lambda h: h.sum(-1)),
    "means_added_up": ("columns", lambda h: h.mean(-1)),
    "variances_averaged": ("columns", lambda h: h.var(-1)),
    "norms_added_up": ("columns", lambda h: torch.linalg.vector_norm(h, dim=-1)),
    "logarithms_added_up": ("columns", lambda h: h.logsumexp(-1)),
    "products_not_added_up": ("rows", lambda h: h),
    "own_parts_softmax": ("columns", lambda h: h.softmax(-1)),
    "own_parts_added": ("columns", lambda h: h.cumsum(-1)),
    "own_parts_reversed": ("columns", lambda h: h.flip(-1)),
    "own_parts_rolled": ("columns", lambda h: h.roll(1, -1)),
    "own_parts_padded": ("columns", lambda h: F.pad(h, (1, 1))),
    "own_parts_joined": ("columns", lambda h: torch.cat([h, h * 2], -1)),
    "dim_from_the_end_not_seen": ("columns", lambda h: h.logcumsumexp(-1)),
    "triangle_of_own_rows": ("batch", torch.tril),
    "place_in_own_rows": ("columns", lambda h: h.max(-1)[0]),
    "moved_dim_left": ("columns", lambda h: h.transpose(0, 1)),
    "new_dim_not_counted": ("columns", lambda h: h.unsqueeze(0)),
    "term_on_every_rank": ("rows", lambda h: h + _like(h, torch.ones(SIZE))),
    "filled_on_every_rank": ("rows", lambda h: h.masked_fill(_like(h, torch.eye(SIZE, dtype=torch.bool)), 2.0)),
    "written_without_its_sum": ("rows", _added_in_place),
}
"""Name of a wrong rule -> how the layer is parallelized, and how it ends."""

ALL = LAYERS | {
    "mse_loss": ("columns", lambda h: F.mse_loss(h, 3 * h.detach())),
    "product": ("rows", lambda h: h),
}
"""The layers with a wrong rule, and layers on unchanged torch."""


class Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE, SIZE))
        self.style, self.last = ALL[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(x @ self.weight)
        return found


class Sharded(nn.Module):
    """The layer on DTensors, with a whole output."""

    def __init__(self, layer: Layer, mesh: DeviceMesh) -> None:
        super().__init__()
        self.last, self.mesh = layer.last, mesh
        self.of_x, of_weight = STYLES[layer.style]
        self.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh, [of_weight], src_data_rank=None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return self.local_of(self.last(whole.redistribute(placements=[self.of_x]) @ self.weight))

    def local_of(self, found: DTensor) -> torch.Tensor:
        return found.full_tensor()


class Unreduced(Sharded):
    """Takes its rank's share of the output for the whole, which is wrong."""

    def local_of(self, found: DTensor) -> torch.Tensor:
        return found.to_local()


def sharded(layer: Layer, mesh: DeviceMesh) -> nn.Module:
    return Sharded(layer, mesh)


def unreduced(layer: Layer, mesh: DeviceMesh) -> nn.Module:
    return Unreduced(layer, mesh)


def case_of(name: str, parallelize: str = "sharded") -> ModuleCase:
    """Returns the case of one layer on two ranks, with real values."""
    return ModuleCase(
        world_size=2,
        build=f"{__name__}:build_{name}",
        parallelize=f"{__name__}:{parallelize}",
        x_shape=(SIZE, SIZE),
        values=(("real", 0),),
    )


def subject_of(name: str) -> str:
    return f"{__name__}:{name}" if name in LAYERS else "module"


def _on_a_wrong_rule(name: str) -> Callable[[ModuleCase, DeviceMesh, Given], Answers]:
    def subject(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
        with planted(WRONG[name]):
            return module(case, mesh, given)

    return subject


globals().update({name: _on_a_wrong_rule(name) for name in LAYERS})
globals().update({f"build_{name}": functools.partial(Layer, name) for name in ALL})
