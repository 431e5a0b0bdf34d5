"""A step of training whose loss is the mean over all tokens of the whole batch, however it is cut.

Ranks, and micro-batches of a rank, have different numbers of tokens that count, so that no mean of their means is it.
The gradient of a sum over tokens is the sum of those of its parts: each rank goes backward from the sum of its own
tokens, divided by how many there are on all ranks, times the ranks over which its gradients are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

VOCAB, FEATURES, IGNORED = 7, 6, -100
MAX_NORM = 0.5

MicroBatch = dict[str, torch.Tensor]


class NextToken(nn.Module):
    """Logits of the next token from the token before, and their cross entropy with the targets that count."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, FEATURES)
        self.norm = nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, VOCAB)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.norm(self.embedding(ids)))).flatten(0, -2)
        loss = functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction=reduction)
        return {"loss": loss}


def next_token() -> nn.Module:
    return NextToken()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def token_mean(
    module: nn.Module, mesh: DeviceMesh, micro_batches: Sequence[MicroBatch], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """One step: gradients reduced once, after the last micro-batch, clipped by the norm of all, and the update."""
    optimizer.zero_grad()
    num_tokens = torch.stack([tokens_in(each) for each in micro_batches]).sum()
    distributed.all_reduce(num_tokens, group=mesh.get_group())
    losses = []
    for number, each in enumerate(micro_batches):
        reduces_gradients(module, number == len(micro_batches) - 1)
        loss = module(**each, reduction="sum")["loss"]
        (loss * mesh.size() / num_tokens).backward()
        losses.append(loss.detach())
    total = torch.stack(losses).sum()
    distributed.all_reduce(total, group=mesh.get_group())
    norm = clip(module)
    optimizer.step()
    return {"loss": total / num_tokens, "total_norm": norm}


def tokens_in(micro_batch: MicroBatch) -> torch.Tensor:
    """How many targets count."""
    return (micro_batch["targets"] != IGNORED).sum()


def reduces_gradients(module: Any, is_last: bool) -> None:  # noqa: FBT001
    """Has the next backward reduce the gradients over the ranks, or not."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(is_last)
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = is_last


def clip(module: nn.Module) -> torch.Tensor:
    """The norm of all gradients before they are clipped, whole on every rank."""
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
