"""Methods that run on each rank's rows, wrong in one way each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

from equivtest.programs.case import ModuleCase
from equivtest.programs.examples.by_local_functions import WeightedByRows, by_rows
from equivtest.programs.run.module import run_module
from tests.defects.defect import Replacing, argument_of

wrong = Replacing("module")

_SUBJECT = "equivtest.programs.examples.by_local_functions:"
_SMALLEST = ModuleCase(
    world_size=2,
    build=_SUBJECT + "weighted",
    parallelize=_SUBJECT + "by_rows",
    inputs=(("x", "real", ("rows", 2)),),
    sizes=(("rows", 2),),
    positional=("x",),
)
_WHY = "one rank has all rows, and each of two must have as many as the other"


@wrong("a reduction missing in the backward", _SMALLEST, _WHY, claim="gradients_equal_unsharded")
@argument_of(run_module)
def weight_learns_from_own_rows(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """local_map takes the gradient of the weight for replicated, so each rank keeps its share of the gradient."""
    by_rows(module, mesh).__class__ = _OwnGradient
    return module


class _OwnGradient(WeightedByRows):
    def weigh(self, dim: int, operands: list[torch.Tensor], signs: Any, *, relu: bool) -> Any:
        rows, whole, share = [Shard(0)], [Replicate()], [Partial()]
        own = local_map(
            super(WeightedByRows, self).weigh,
            out_placements=(rows, None, share),
            in_placements=(None, rows, whole, None),
            redistribute_inputs=True,
        )
        return own(dim, operands, signs.to_local(), relu=relu)


@wrong("shard order", _SMALLEST, _WHY)
@argument_of(run_module)
def each_part_turned_alone(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each rank turns its own rows along dim 0, and the parts stay in their order."""
    by_rows(module, mesh).__class__ = _TurnedAlone
    return module


class _TurnedAlone(WeightedByRows):
    def turn(self, rows: torch.Tensor, dim: int) -> Any:
        return local_map(super(WeightedByRows, self).turn, out_placements=[Shard(0)])(rows, dim)
