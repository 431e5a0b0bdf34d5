"""FSDP2 with switches, wrong in one way each."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from equivtest.programs.case import MEAN_OF_PARTS, ModuleCase
from equivtest.programs.examples.switches import ByMethod, fully_sharded_by_switches
from equivtest.programs.run.module import run_module
from tests.defects.defect import Replacing, argument_of

wrong = Replacing("module")

_SUBJECT = "equivtest.programs.examples.switches:"
_SWITCHES = "together=False, offloads=False, prefetches=False, gathers_early=False"


def _ignoring(layer: str) -> ModuleCase:
    return ModuleCase(
        world_size=2,
        build=_SUBJECT + "by_method",
        parallelize=f"{_SUBJECT}fully_sharded_by_switches(ignores={layer!r}, {_SWITCHES})",
        x_shape=(2, 2),
        batch=MEAN_OF_PARTS,
    )


_ROWS = "one rank has all rows, and each of two must have one"


@wrong("a reduction missing in the backward", _ignoring("up"), _ROWS, claim="gradients_equal_unsharded")
@argument_of(run_module)
def ignored_gradient_of_own_rows(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The gradient of the weight that FSDP2 ignores is not averaged."""
    block: Any = cast("ByMethod", module).block
    for layer in block.children():
        fully_shard(layer, mesh=mesh, ignored_params={block.up.weight})
    return module


@wrong("wrong divisor or wrong group", _ignoring("down"), _ROWS, claim="gradients_equal_unsharded")
@argument_of(run_module)
def ignored_gradient_averaged_twice(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The gradient of the weight that FSDP2 ignores is divided by the number of ranks twice."""
    fully_sharded_by_switches(cast("ByMethod", module), mesh, ignores="down")
    weight: Any = cast("ByMethod", module).block.down.weight
    weight.register_hook(lambda gradient: gradient / mesh.size())
    return module
