"""Layers that take other collectives than they are documented to take."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

from equivtest.families.linear.case import LinearCase
from equivtest.families.linear.subject import run_linear
from tests.defects.defect import Replacing, run_with

wrong = Replacing("rowwise_linear")

Given = Mapping[str, torch.Tensor]


class _ReducedWhole(nn.Linear):
    """Rowwise: a sharded output is reduced whole on every rank and then cut, w times the traffic."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = super().forward(x)
        assert isinstance(partial, DTensor)
        return partial.redistribute(placements=[Replicate()])  # right: partial, reduced and scattered by the style


output_reduced_whole = wrong(
    "other collectives than documented",
    LinearCase(world_size=2, style="rowwise", in_features=2, output_layout="shard(0)", requires_grad=(), records=True),
    "one rank reduces nothing, and torch reduces nothing if there are fewer in features than ranks",
    claim="uses_only_collectives",
)(run_with(run_linear, RowwiseParallel, _ReducedWhole))
