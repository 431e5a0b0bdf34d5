"""Sharding by FullyShardedDataParallel, which divides one flat parameter evenly, and pads it.

Source: torch/distributed/fsdp/fully_sharded_data_parallel.py and the docstrings of ShardingStrategy and FlatParamHandle
(2.13.0).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from equivtest.programs.examples.token_mean import MAX_NORM, TokenMean


def flat_sharded(
    block: nn.Module, mesh: DeviceMesh, *, strategy: str, by_name: bool, by_layers: bool = True
) -> nn.Module:
    """Flattens each layer and the rest of the block, or the whole block, and divides the flat parameters.

    Args:
        strategy: Name of a ShardingStrategy. 'NO_SHARD' keeps all parameters on each rank, and averages gradients.
        by_name: Whether the parameters keep their names. Otherwise each flat parameter is one parameter.
        by_layers: Whether each layer has a flat parameter of its own.
    """
    policy = ModuleWrapPolicy({nn.Linear, nn.Embedding}) if by_layers else None
    return FullyShardedDataParallel(
        block,
        process_group=mesh.get_group(),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=policy,
        device_id=torch.device(mesh.device_type),
        use_orig_params=by_name,
    )


class FlatTokenMean(TokenMean):
    """Runs all micro-batches except the last in `no_sync`, and clips by the module's own method."""

    def accumulate(self, number: int) -> None:
        with nullcontext() if self.reduces(number) else self.module.no_sync():
            self.run_micro_batch(number)

    def clipped(self) -> torch.Tensor:
        norm: Any = self.module.clip_grad_norm_(MAX_NORM)
        return torch.as_tensor(norm)


flat_token_mean = FlatTokenMean.step
