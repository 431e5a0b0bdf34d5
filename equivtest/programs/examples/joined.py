"""A step of training in which ranks have different numbers of micro-batches.

Source: DistributedDataParallel.join and join_hook in torch/nn/parallel/distributed.py, Join in
torch/distributed/algorithms/join.py (2.13.0).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from equivtest.programs.examples.token_mean import MicroBatch, Report, TokenMean, change_buffers


def replicated(module: nn.Module, mesh: DeviceMesh, *, ends: str = "") -> nn.Module:
    """Replicates the module.

    Args:
        ends: If 'early', a first context raises on all ranks as soon as one has no further row. A second context has
            the remaining rows. If 'off', the context is disabled if all ranks have the same number of rows.
    """
    made = DistributedDataParallel(module, process_group=mesh.get_group())
    made.ends = ends  # type: ignore[assignment]  # read by the step
    return made


class Joined(TokenMean):
    """Runs each row of a rank as one micro-batch, in the context `join` of DistributedDataParallel.

    DistributedDataParallel averages the gradients of each micro-batch. A rank without further rows contributes zeros.
    The average is over all ranks in every second step, and in the other steps over the ranks that have a row. The step
    adds up the averages. So the ranks with the most rows have the gradients of the whole batch. These ranks update
    their parameters, and all other ranks receive the parameters when the context ends.

    Before each forward, all ranks receive the buffers of the last rank that has a further row. The buffers of all other
    ranks change after each forward, in the way in which running statistics follow a rank's own rows.

    Attributes:
        ends: How the context ends: see `replicated`.
        divides_by_all: Whether gradients are averaged over all ranks in this step.
        num_rows: Number of rows of each rank. The first rank has the most rows.
    """

    def __init__(self, module: Any, mesh: DeviceMesh, micro_batches: Any, optimizer: torch.optim.Optimizer) -> None:
        (batch,) = micro_batches
        rows: list[MicroBatch] = [
            dict(zip(batch, row, strict=True)) for row in zip(*(each.split(1) for each in batch.values()), strict=True)
        ]
        super().__init__(module, mesh, rows, optimizer)
        self.divides_by_all: bool = getattr(module, "divides_by_all", False)
        module.divides_by_all = not self.divides_by_all
        self.ends: str = getattr(module, "ends", "")
        own = torch.zeros(mesh.size(), device=self.own.device)
        own[mesh.get_local_rank()] = len(rows)
        self.num_rows = self.summed(own)
        self.parameters = list(module.parameters())
        self.totals = [torch.zeros_like(each) for each in self.parameters]

    @property
    def is_enabled(self) -> bool:
        return bool(self.ends != "off" or self.num_rows.min() < self.num_rows.max())

    def join(self, **how: bool) -> Any:
        return self.module.join(divide_by_initial_world_size=self.divides_by_all, **how)

    def run(self) -> Report:
        if self.ends == "early":
            self.run_until_one_ends()
        with self.join(enable=self.is_enabled):
            self.run_rows()
            for parameter, total in zip(self.parameters, self.totals, strict=True):
                parameter.grad = total
            if len(self.micro_batches) == self.num_rows[0]:
                self.update()
        self.reduce()
        return {"loss": self.reported()}

    def run_rows(self) -> None:
        for number in range(len(self.losses), len(self.micro_batches)):
            self.begin()
            self.run_micro_batch(number)
            if self.mesh.get_local_rank() != self.sender(number + 1):
                change_buffers(self.module)

    def run_until_one_ends(self) -> None:
        """Runs the rows for which each rank has one.

        Raises:
            AssertionError: torch does not raise although some rank has no further row.
        """
        try:
            with self.join(throw_on_early_termination=True):
                self.run_rows()
        except RuntimeError:
            return
        if self.num_rows.min() < self.num_rows.max():
            raise AssertionError("throw_on_early_termination=True, a rank has no further row, and join did not raise")

    def sender(self, number: int) -> int:
        """Returns the rank that sends its buffers before a forward, or before the end if no rank has a further row.

        In a disabled context the first rank sends.
        """
        if not self.is_enabled:
            return 0
        number = min(number, int(self.num_rows[0]) - 1)
        return int((self.num_rows > number).sum()) - 1

    def scaled(self, number: int, loss: torch.Tensor) -> torch.Tensor:
        num_averaged = self.mesh.size() if self.divides_by_all else (self.num_rows > number).sum()
        return loss * num_averaged / self.num_tokens

    def backward(self, number: int, loss: torch.Tensor) -> None:
        super().backward(number, loss)
        for parameter, total in zip(self.parameters, self.totals, strict=True):
            total += parameter.grad

    def reduce(self) -> None:
        """Sends the gradients of the first rank to all ranks."""
        for total in self.totals:
            distributed.broadcast(total, group=self.mesh.get_group(), group_src=0)


joined = Joined.step
