"""FSDP2 with layers in bfloat16, wrong in one way each."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from equivtest.programs.case import MEAN_OF_PARTS, ModuleCase
from equivtest.programs.examples.narrow import NARROW, NarrowBlock
from equivtest.programs.run.module import run_module
from tests.defects.defect import Replacing, argument_of

wrong = Replacing("module")

_SUBJECT = "equivtest.programs.examples.narrow:"
_PLAN = "equivtest.programs.examples.narrow_plan:"
_POLICY: Any = {"param_dtype": NARROW, "reduce_dtype": torch.float32, "output_dtype": torch.float32}


def _case(world_size: int) -> ModuleCase:
    return ModuleCase(
        world_size=world_size,
        build=f"{_SUBJECT}narrow_block(widens=False)",
        parallelize=f"{_PLAN}fully_sharded_with_casts(casts_in_layers=False, replicas=False, recomputes='')",
        x_shape=(4, 2),
        batch=MEAN_OF_PARTS,
        values=(("real", 0),),
    )


@wrong("operands in fewer bits", _case(1), "one rank casts too; the sizes of the module are its own")
@argument_of(run_module)
def residual_cast(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 casts the input of the block, so the residual is in bfloat16."""
    policy = MixedPrecisionPolicy(**_POLICY)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    return module


@wrong(
    "a reduction missing in the backward", _case(2), "one rank has all rows, and each of two must have one",
    claim="gradients_equal_unsharded",
)  # fmt: skip
@argument_of(run_module)
def second_layer_of_each_rank(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The second layer is not sharded, so no rank averages its gradients over the ranks."""
    block = cast("NarrowBlock", module)
    ignored: Any = set(block.second.parameters())
    policy = MixedPrecisionPolicy(**_POLICY, cast_forward_inputs=False)
    fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    return block
