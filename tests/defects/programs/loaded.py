"""Ways to save and load the state of a module on a mesh of two axes, wrong in one way each."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from equivtest.programs.case import MEAN_OF_PARTS, ModuleCase
from equivtest.programs.examples.plans import loaded, sharded_sequence_parallel
from equivtest.programs.run.module import run_module
from tests.defects.defect import Replacing, argument_of

wrong = Replacing("module")

_LOADED = ModuleCase(
    world_size=2,
    axes=("dp", "tp"),
    mesh=(2, 1),
    build="equivtest.programs.examples.gated:even_block",
    parallelize="equivtest.programs.examples.plans:sharded_sequence_parallel_from_state(whole=True)",
    x_shape=(4, 2, 2),
    batch=MEAN_OF_PARTS,
)
_WHOLE = StateDictOptions(full_state_dict=True)


def saved(block: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
    sharded = sharded_sequence_parallel(copy.deepcopy(block), mesh)
    return get_model_state_dict(sharded, options=StateDictOptions())


@wrong("rounded on its way", _LOADED.but(values=(("real", 0),)), "bfloat16 holds the integers that are drawn")
@argument_of(run_module)
def rounded_state(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The copy is cast to bfloat16 before its state is saved."""
    state = get_model_state_dict(copy.deepcopy(block).to(torch.bfloat16))
    return loaded(sharded_sequence_parallel(block, mesh), state, _WHOLE)


@wrong("a step left out", _LOADED, "no parameter is loaded")
@argument_of(run_module)
def names_of_a_wrapper(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The state has the names of a wrapped module, and names that do not fit are ignored."""
    state = {f"module.{name}": tensor.clone() for name, tensor in block.state_dict().items()}
    options = StateDictOptions(full_state_dict=True, strict=False)
    return loaded(sharded_sequence_parallel(block, mesh), state, options)


@wrong("shard order", _LOADED.but(world_size=4, mesh=(2, 2)), "both axes must have two ranks")
@argument_of(run_module)
def joined_in_the_order_of_ranks(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shards along both axes are joined in the order of ranks, but FSDP2 shards what tensor parallelism has sharded."""
    state = {name: joined(shard, mesh) for name, shard in saved(block, mesh).items()}
    return loaded(sharded_sequence_parallel(block, mesh), state, _WHOLE)


def joined(sharded: DTensor, mesh: DeviceMesh) -> torch.Tensor:
    if any(getattr(each, "dim", None) != 0 for each in sharded.placements):
        return sharded.full_tensor()
    own = sharded.to_local().detach()
    for axis in ("tp", "dp"):
        shards: list[Any] = [None] * mesh[axis].size()
        distributed.all_gather_object(shards, own, group=mesh[axis].get_group())
        own = torch.cat(shards)
    return own
