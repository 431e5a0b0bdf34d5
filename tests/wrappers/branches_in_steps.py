"""Branches that are trained together: the mean of the squares of what all give, whose gradients each has for itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

BYTES_OF_FLOAT32 = 4
MIB = 2**20


class Branch(nn.Module):
    """y = W2 relu(W1 x + b), with an unused parameter if requested."""

    def __init__(self, *, has_unused: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 5), nn.Linear(5, 1, bias=False)
        self.unused = nn.Parameter(torch.zeros(3)) if has_unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(functional.relu(self.up(x)))
        return output


class Branches(nn.Module):
    """The mean over the batch of the squares of what all branches give, or the sum."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, Branch(has_unused="unused" in name))

    def forward(self, x: torch.Tensor, reduction: str = "mean") -> dict[str, torch.Tensor]:
        squares = torch.stack([branch(x).square().sum() for branch in self.children()]).sum()
        return {"loss": squares / x.shape[0] if reduction == "mean" else squares}


def bucket_of(numel: int) -> float:
    """Returns the size of a bucket of so many float32 elements in MiB."""
    return numel * BYTES_OF_FLOAT32 / MIB


REPLICATED: dict[str, dict[str, Any]] = {
    "a_bucket_each": {"bucket_cap_mb": bucket_of(1)},
    "a_bucket_less_than_all": {"bucket_cap_mb": bucket_of(19)},
    "a_bucket_of_all": {"bucket_cap_mb": bucket_of(20)},
    "a_bucket_more_than_all": {"bucket_cap_mb": bucket_of(21)},
    "views_in_buckets": {"gradient_as_bucket_view": True, "bucket_cap_mb": bucket_of(5)},
    "static_views": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused_in_views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "unused_static": {"static_graph": True},
    "unused_skipped": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    "not_synchronized_at_first": {"init_sync": False},
    "buffers_left": {"broadcast_buffers": False},
    "buffers_left_in_forward": {"forward_sync_buffers": False},
    "copied_together": {"batched_grad_copy": True},
    "buckets_of_a_list": {"bucket_cap_mb_list": [1, 1]},
    "hooked": {},
}
"""The arguments of DistributedDataParallel in each branch; 'hooked' has torch's allreduce_hook."""


def replicated_branches() -> nn.Module:
    return Branches(REPLICATED)


SHARDED = (
    "synchronized_each_time",
    "synchronized_last",
    "layers_synchronized_last",
    "waiting_at_the_last_backward",
    "kept_after_backward",
    "layer_kept_after_backward",
    "unused_in_the_layers",
)
"""Branches that are fully sharded along one axis, each with its own options."""

BOTH_WAYS = (
    "reduced_each_time",
    "reduced_last",
    "all_reduced_last",
    "layers_all_reduced_last",
    "of_dtensors",
    "unused_in_both_ways",
)
"""Replicated along one axis and sharded along the other."""


def sharded_branches() -> nn.Module:
    return Branches(SHARDED)


def branches_both_ways() -> nn.Module:
    return Branches(BOTH_WAYS)


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.25, momentum=0.5)
