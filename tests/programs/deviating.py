"""Process groups in Python that deviate from gloo in ways that torch allows, and others that are wrong.

Source: torch.distributed promises a sum of all operands, in no fixed order and without a fixed rounding (2.13.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist

from tests.programs.planted import Planted, ReduceOp, done


class Deviating(Planted):
    """Sums and averages of real numbers come from `total`; gloo does the rest."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        options = options or dist.AllreduceOptions()
        is_average = options.reduceOp == ReduceOp.AVG
        if not (is_average or options.reduceOp == ReduceOp.SUM) or not tensors[0].is_floating_point():
            return self._inner.allreduce(tensors, options)
        operands = [torch.empty_like(tensors[0]) for _ in range(self.size())]
        self._inner.allgather([operands], [tensors[0]]).wait()
        tensors[0].copy_(self.average(operands) if is_average else self.total(operands))
        return done(tensors)

    def total(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError

    def average(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.total(operands) / self.size()


def one_by_one(operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in the order given, rounded after each addition."""
    total = operands[0].clone()
    for operand in operands[1:]:
        total += operand
    return total


class LastRankFirst(Deviating):
    def total(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        return one_by_one(operands[::-1])


class OrderVaries(Deviating):
    """Sums in another order in each call, equal on all ranks; declared."""

    num_calls = 0

    def total(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        self.num_calls += 1
        source = torch.Generator().manual_seed(self.num_calls)
        return one_by_one([operands[rank] for rank in torch.randperm(len(operands), generator=source).tolist()])


class Flushes(Deviating):
    """Sums below the smallest normal number are zeros; declared."""

    def total(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        total = one_by_one(operands)
        return torch.where(total.abs() < torch.finfo(total.dtype).tiny, 0.0, total)


class CutsTowardZero(Deviating):
    """Sums in bfloat16 are rounded toward zero, once."""

    def total(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        total = one_by_one(operands)
        if total.dtype != torch.bfloat16:
            return total
        exact = torch.stack(list(operands)).double().sum(0)
        rounded = exact.bfloat16()
        too_large = rounded.double().abs() > exact.abs()
        return torch.where(too_large, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)


class AveragesBefore(Deviating):
    """Each operand is divided, then all are added."""

    def total(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        return one_by_one(operands)

    def average(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        return one_by_one([operand / self.size() for operand in operands])


class WideSums(Deviating):
    """Sums are computed in float64, and rounded once."""

    def total(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        return one_by_one([operand.double() for operand in operands]).to(operands[0].dtype)


class PositiveZeros(Deviating):
    """Sums begin with +0.0."""

    def total(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        return one_by_one([torch.zeros_like(operands[0]), *operands])


class InPairs(Deviating):
    """Neighbours are added first."""

    def total(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        pairs = [one_by_one(operands[place : place + 2]) for place in range(0, len(operands), 2)]
        return pairs[0] if len(pairs) == 1 else self.total(pairs)


class WritesBeside(Planted):
    """A gather writes one element behind its result, if there is memory behind it."""

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        work = self._inner._allgather_base(output, given, *([options] if options else []))
        work.wait()
        behind = output.storage_offset() + output.numel()
        if behind < output.untyped_storage().nbytes() // output.element_size():
            output.as_strided((1,), (1,), behind).zero_()
        return work


class BitsJoined(Planted):
    """An exclusive or is an or."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        if options is not None and options.reduceOp == ReduceOp.BXOR:
            options.reduceOp = ReduceOp.BOR
        return self._inner.allreduce(tensors, options or dist.AllreduceOptions())


class LosesTails(Planted):
    """A message of more than 8 elements loses its last one."""

    def recv(self, tensors: list[torch.Tensor], *others: Any) -> Any:
        work = self._inner.recv(tensors, *others)
        work.wait()
        if tensors[0].numel() > 8:
            tensors[0].view(-1)[-1] = 0
        return done(tensors)


class Queue(dist.Work):
    """A work; its result is there only after a wait for all earlier works."""

    waiting: list[Queue] = []  # noqa: RUF012  (of the whole process)

    def __init__(self, work: Any, output: torch.Tensor) -> None:
        super().__init__()
        self._work, self._output = work, output
        self.waiting.append(self)

    def wait(self, *args: Any) -> bool:
        if self in self.waiting:  # else it was waited for before
            self._work.wait(*args)
            if self.waiting[0] is not self:
                self._output.zero_()
            self.waiting.remove(self)
        return True


class OnlyInOrder(Planted):
    """A broadcast that is waited for before an earlier one gives zeros."""

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        return Queue(self._inner.broadcast(tensors, options), tensors[0])


class OpensEarly(Planted):
    """A barrier that does not wait."""

    def barrier(self, *_: Any, **__: Any) -> Any:
        return done([])


class Tires(Planted):
    """Each 1,000th gather loses the last rank's part."""

    gathers = 0

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        work = self._inner._allgather_base(output, given, *([options] if options else []))
        self.gathers += 1
        if self.gathers % 1000 == 0:
            work.wait()
            output.view(self.size(), -1)[-1] = 0
        return work
