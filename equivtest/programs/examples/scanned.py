"""Blocks that show findings 40 and 41, in which a DTensor operator of torch is wrong.

The hidden features or the tokens of a block are divided among the ranks.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    parallelize_module,
)


class ScannedBlock(nn.Module):
    """Maps x (..., 1) to y = W2 s (..., 1). The vector s has the running sums of the hidden features W1 x."""

    def __init__(self, num_hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(1, num_hidden, bias=False)
        self.second = nn.Linear(num_hidden, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(torch.cumsum(self.first(x), -1))
        return output


def scanned_block() -> nn.Module:
    return ScannedBlock(2)


def features_divided(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {"first": ColwiseParallel(use_local_output=False), "second": RowwiseParallel()}
    return parallelize_module(block, mesh, plan)


class PickedBlock(nn.Module):
    """Picks the second feature of the first two of T tokens.

    The input x has the shape (T, 2), in which T is at least 2. The output has the shape (2, 1).
    """

    place: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("place", torch.ones(2, 1, dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.gather(-1, self.place)


def picked_block() -> nn.Module:
    return PickedBlock()


def tokens_divided(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divides the tokens among the ranks. Every rank has the positions of all tokens."""
    assert isinstance(block, PickedBlock)
    block.place = distribute_tensor(block.place, mesh, [Replicate()])
    prepared = PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=Shard(0),
        use_local_input=False,
        output_layouts=Shard(0),
        desired_output_layouts=Replicate(),
    )
    return parallelize_module(block, mesh, {"": prepared})
