"""A step of training in which ranks have different numbers of micro-batches.

Source: DistributedDataParallel.join and join_hook in torch/nn/parallel/distributed.py, Join in
torch/distributed/algorithms/join.py (2.13.0).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from equivtest.programs.examples.token_mean import MicroBatch, Report, TokenMean, change_buffers


def replicated(module: nn.Module, mesh: DeviceMesh, *, ends: str = "") -> nn.Module:
    """Replicates the module.

    Args:
        ends: If 'early', a first context raises on all ranks as soon as one has no further row. A second context has
            the remaining rows, and torch looks for unused parameters. If 'off', the context is disabled if all ranks
            have the same number of rows.
    """
    made = DistributedDataParallel(module, process_group=mesh.get_group(), find_unused_parameters=ends == "early")
    made.ends = ends  # type: ignore[assignment]  # read by the step
    return made


class Counter(Joinable):
    """Counts the rows of all ranks, in one collective for each further row of any rank.

    Source: torch's tutorial of the join context manager (2.13.0), which has a counter like this one.

    Attributes:
        count: Number of rows so far, of all ranks that have not joined. The last joiner's count replaces it at the end.
    """

    def __init__(self, like: torch.Tensor, group: distributed.ProcessGroup, rank: int) -> None:
        super().__init__()
        self.group, self.rank = group, rank
        self.count = torch.zeros(1, device=like.device)

    def __call__(self) -> None:
        Join.notify_join_context(self)
        self.add(1.0)

    def add(self, number: float) -> None:
        total = torch.full_like(self.count, number)
        distributed.all_reduce(total, group=self.group)
        self.count += total if number else 0.0

    def join_hook(self, **how: Any) -> JoinHook:
        return CounterHook(self)

    @property
    def join_device(self) -> torch.device:
        return self.count.device

    @property
    def join_process_group(self) -> distributed.ProcessGroup:
        return self.group


class CounterHook(JoinHook):
    def __init__(self, counter: Counter) -> None:
        self.counter = counter

    def main_hook(self) -> None:
        self.counter.add(0.0)

    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: FBT001  # torch's signature
        """Sends the count of the last joiner with the smallest rank to all ranks."""
        counter = self.counter
        first = torch.tensor([counter.rank if is_last_joiner else counter.group.size()], device=counter.join_device)
        distributed.all_reduce(first, distributed.ReduceOp.MIN, group=counter.group)
        distributed.broadcast(counter.count, group=counter.group, group_src=int(first))


class Joined(TokenMean):
    """Runs each row of a rank as one micro-batch, in the context `join` of DistributedDataParallel.

    DistributedDataParallel averages the gradients of each micro-batch. A rank without further rows contributes zeros.
    The average is over all ranks in every second step, and in the other steps over the ranks that have a row. The step
    adds up the averages. So the ranks with the most rows have the gradients of the whole batch. These ranks update
    their parameters, and all other ranks receive the parameters when the context ends.

    The last row runs twice, first in `no_sync`.

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
        self.counter: Counter | None = None
        if self.divides_by_all:
            self.counter = Counter(own, mesh.get_group(), mesh.get_local_rank())
        self.parameters = list(module.parameters())
        self.totals = [torch.zeros_like(each) for each in self.parameters]

    @property
    def is_enabled(self) -> bool:
        return bool(self.ends != "off" or self.num_rows.min() < self.num_rows.max())

    def join(self, **how: bool) -> Any:
        """Returns a context that the module joins. In every second step, a counter joins it too."""
        if self.counter is None:
            return self.module.join(divide_by_initial_world_size=self.divides_by_all, **how)
        return Join([self.module, self.counter], divide_by_initial_world_size=self.divides_by_all, **how)

    def run(self) -> Report:
        if self.ends == "early":
            self.run_until_one_ends()
        with self.join(enable=self.is_enabled):
            self.run_rows()
            for parameter, total in zip(self.parameters, self.totals, strict=True):
                parameter.grad = total
            if len(self.micro_batches) == self.num_rows[0]:
                self.update()
        self.require_count()
        self.reduce()
        return {"loss": self.reported()}

    def require_count(self) -> None:
        """Compares the counter with the number of all rows. The last row of a rank with most rows counts twice.

        Raises:
            AssertionError: the count is another.
        """
        num_longest = (self.num_rows == self.num_rows[0]).sum()
        if self.counter is not None and self.counter.count != self.num_rows.sum() + num_longest:
            raise AssertionError(f"counted {self.counter.count} in {self.num_rows} rows, {num_longest} of them twice")

    def run_rows(self) -> None:
        for number in range(len(self.losses), len(self.micro_batches)):
            if number == self.num_rows[0] - 1:
                self.run_unsynchronized(number)
            self.begin()
            self.run_micro_batch(number)
            self.count()
            if self.mesh.get_local_rank() != self.sender(number + 1):
                change_buffers(self.module)

    def run_unsynchronized(self, number: int) -> None:
        """Runs a row in `no_sync`. Its gradients are dropped, and the ranks that have joined reduce none."""
        with self.module.no_sync():
            torch.autograd.backward(self.module(**self.micro_batches[number])["loss"])
        self.count()

    def count(self) -> None:
        if self.counter is not None:
            self.counter()

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
