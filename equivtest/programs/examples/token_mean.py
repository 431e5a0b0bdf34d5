"""A step of training whose loss is the mean over all tokens of the whole batch, however the batch is cut.

Ranks, and micro-batches of a rank, have different numbers of tokens that count. So the mean of the ranks' means differs
from the mean over all tokens.  The gradient of a sum is the sum of its terms' gradients.  So each rank multiplies the
sum over its tokens by the number of ranks over which its gradients are averaged. The rank divides the product by the
number of tokens on all ranks, and runs backward from the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from equivtest.programs.examples.next_token import IGNORED

MAX_NORM = 0.5

MicroBatch = dict[str, torch.Tensor]
Report = dict[str, torch.Tensor]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


class TokenMean:
    """One step of training.

    The step reduces gradients after the last micro-batch, clips the gradients by their total norm, and updates the
    parameters.

    Attributes:
        own: Number of targets that are not ignored in each micro-batch of this rank.
        num_tokens: Number of targets that are not ignored on all ranks.
        losses: The summed loss of each micro-batch so far.
    """

    def __init__(
        self, module: Any, mesh: DeviceMesh, micro_batches: Sequence[MicroBatch], optimizer: torch.optim.Optimizer
    ) -> None:
        self.module, self.mesh, self.micro_batches, self.optimizer = module, mesh, micro_batches, optimizer
        self.own = torch.stack([tokens_in(each) for each in micro_batches])
        self.num_tokens = self.counted()
        self.losses: list[torch.Tensor] = []

    @classmethod
    def step(cls, *given: Any) -> Report:
        """Runs the step. The arguments are module, mesh, micro_batches and optimizer, as for `Training.step`."""
        return cls(*given).run()

    def run(self) -> Report:
        self.begin()
        for number in range(len(self.micro_batches)):
            self.accumulate(number)
        self.reduce()
        norm = self.clipped()
        self.update()
        return {"loss": self.reported(), "total_norm": norm}

    def accumulate(self, number: int) -> None:
        """Adds the gradients of one micro-batch to the earlier gradients."""
        reduces_gradients(self.module, self.reduces(number))
        self.run_micro_batch(number)

    def run_micro_batch(self, number: int) -> None:
        loss = self.module(**self.micro_batches[number], reduction="sum")["loss"]
        self.backward(number, self.scaled(number, loss))
        self.losses.append(loss.detach())

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(tensor, group=self.mesh.get_group())
        return tensor

    def counted(self) -> torch.Tensor:
        return self.summed(self.own.sum())

    def begin(self) -> None:
        self.optimizer.zero_grad()

    def reduces(self, number: int) -> bool:
        return number == len(self.micro_batches) - 1

    def scaled(self, number: int, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.mesh.size() / self.num_tokens

    def backward(self, number: int, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss)

    def reduce(self) -> None:
        """Does nothing, because the backward of the last micro-batch has already reduced the gradients."""

    def clipped(self) -> torch.Tensor:
        return clip(self.module)

    def update(self) -> None:
        self.optimizer.step()

    def reported(self) -> torch.Tensor:
        return self.summed(torch.stack(self.losses).sum()) / self.num_tokens


token_mean = TokenMean.step


def tokens_in(micro_batch: MicroBatch) -> torch.Tensor:
    return (micro_batch["targets"] != IGNORED).sum()


def reduces_gradients(module: Any, is_last: bool) -> None:  # noqa: FBT001
    """Sets whether the next backward reduces gradients. Between the backwards, FSDP2 keeps the gathered parameters."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(is_last)
        module.set_reshard_after_backward(is_last)
        module.set_is_last_backward(is_last)
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = is_last


def clip(module: nn.Module) -> torch.Tensor:
    """Clips all gradients. Returns their norm before clipping, which every rank has as a whole."""
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def change_buffers(module: nn.Module) -> None:
    with torch.no_grad():
        for buffer in module.buffers():
            buffer += 1
