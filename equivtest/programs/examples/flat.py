"""Sharding by FullyShardedDataParallel, which divides one flat parameter evenly, and pads it.

Source: torch/distributed/fsdp/fully_sharded_data_parallel.py and the docstrings of ShardingStrategy and FlatParamHandle
(2.13.0).
"""

from __future__ import annotations

import operator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from equivtest.programs.examples.plans import average, spoil
from equivtest.programs.examples.token_mean import MAX_NORM, TokenMean

SETTINGS: dict[str, dict[str, Any]] = {
    "in one": {"auto_wrap_policy": None},
    "early": {"forward_prefetch": True, "limit_all_gathers": False},
    "late": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "when used": {"backward_prefetch": None},
    "wide": {"mixed_precision": MixedPrecision(reduce_dtype=torch.float64)},
}
"""Arguments under which the whole block has one flat parameter, that move the gathers, or that reduce in float64."""
IGNORED = {"ignored layer": "up", "ignored weight": "down.weight"}


def flat_sharded(block: nn.Module, mesh: DeviceMesh, *, strategy: str, by_name: bool, setting: str = "") -> nn.Module:
    """Flattens each layer and the rest of the block, or the whole block, and divides the flat parameters.

    Args:
        strategy: Name of a ShardingStrategy. 'NO_SHARD' keeps all parameters on each rank, and averages gradients.
        by_name: Whether the parameters keep their names. Otherwise each flat parameter is one parameter.
        setting: A name in `SETTINGS` or in `IGNORED`, or 'mesh' or 'rewritten'. A hook averages the gradients that are
            ignored. If 'mesh', the module gets the mesh, not its process group. If 'rewritten', the whole parameters
            are read, spoiled and written again.
    """
    how: dict[str, Any] = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear, nn.Embedding})}
    how |= {"device_mesh": mesh} if setting == "mesh" else {"process_group": mesh.get_group()}
    sharded = FullyShardedDataParallel(
        block,
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device(mesh.device_type),
        use_orig_params=by_name,
        ignored_states=ignored(block, mesh, IGNORED[setting]) if setting in IGNORED else None,
        **how | SETTINGS.get(setting, {}),
    )
    if setting == "rewritten":
        rewrite(sharded)
    return sharded


def ignored(block: nn.Module, mesh: DeviceMesh, name: str) -> list[Any]:
    """Returns a layer or a parameter in a list. A hook averages its gradients."""
    part: Any = operator.attrgetter(name)(block)
    for parameter in part.parameters() if isinstance(part, nn.Module) else [part]:
        parameter.register_post_accumulate_grad_hook(partial(average, mesh))
    return [part]


@torch.no_grad()
def rewrite(sharded: FullyShardedDataParallel) -> None:
    """Copies the whole parameters, spoils the shards, and writes the copies into them."""
    summon = FullyShardedDataParallel.summon_full_params
    with summon(sharded, writeback=False):
        whole = {name: parameter.clone() for name, parameter in sharded.named_parameters()}
    spoil(sharded.parameters())
    with summon(sharded):
        for name, parameter in sharded.named_parameters():
            parameter.copy_(whole[name])


class FlatTokenMean(TokenMean):
    """Runs all micro-batches except the last in `no_sync`, and clips by the module's own method."""

    def accumulate(self, number: int) -> None:
        with nullcontext() if self.reduces(number) else self.module.no_sync():
            self.run_micro_batch(number)

    def clipped(self) -> torch.Tensor:
        norm: Any = self.module.clip_grad_norm_(MAX_NORM)
        return torch.as_tensor(norm)


flat_token_mean = FlatTokenMean.step
