"""Layers that take other collectives than they are documented to take."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

from equivtest.families.linear.case import LinearCase
from equivtest.families.linear.subject import run_linear
from equivtest.kit.subject import Answers

Given = Mapping[str, torch.Tensor]


def output_reduced_whole(case: LinearCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Rowwise: a sharded output is reduced whole on every rank and then cut, w times the traffic."""
    return run_linear(case, mesh, given, RowwiseParallel, _ReducedWhole)


class _ReducedWhole(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = super().forward(x)
        assert isinstance(partial, DTensor)
        return partial.redistribute(placements=[Replicate()])  # right: partial, reduced and scattered by the style
