"""Checkpoints that are wrong in one way each."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from equivtest.families.checkpoint.case import CheckpointCase
from equivtest.families.checkpoint.subject import move_by_torch, run_checkpoint
from equivtest.families.checkpoint.subject_moves import Tensors
from tests.defects.defect import Replacing, argument_of

wrong = Replacing("checkpoint")


@wrong("a step left out", CheckpointCase(world_size=1), "one element shows it")
@argument_of(run_checkpoint)
def not_loaded(case: CheckpointCase, saved: Tensors, loaded: Tensors, folder: Path, group: dist.ProcessGroup) -> None:
    """The tensor keeps the values that it had before."""


@wrong(
    "special values replaced",
    CheckpointCase(world_size=1, values=(("special", 0),)),
    "other values are the same number",
    claim="is_exact_without_reduction",
)
@argument_of(run_checkpoint)
def zeros_lose_their_sign(
    case: CheckpointCase, saved: Tensors, loaded: Tensors, folder: Path, group: dist.ProcessGroup
) -> None:
    """Adds +0.0 to what is loaded, which is +0.0 for -0.0."""
    move_by_torch(case, saved, loaded, folder, group)
    x = loaded["x"]
    (x.to_local() if isinstance(x, DTensor) else x).add_(0.0)


@wrong("shard order", CheckpointCase(world_size=2, shape=(2,)), "one element lies on rank 0")
@argument_of(run_checkpoint)
def shard_of_the_first_rank(
    case: CheckpointCase, saved: Tensors, loaded: Tensors, folder: Path, group: dist.ProcessGroup
) -> None:
    """Each rank loads the elements of rank 0, up to the size of its shard."""
    move_by_torch(case, saved, loaded, folder, group)
    x = loaded["x"]
    if isinstance(x, DTensor):
        whole, local = x.full_tensor(), x.to_local()
        local.copy_(whole.flatten()[: local.numel()].view(local.shape))
