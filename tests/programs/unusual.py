"""Process groups in Python with faults in rare cases: sizes, addresses, memory, limits of numbers, tags, ranks.

Each is wrong in one collective, and equals gloo otherwise.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from tests.programs.deviating import Planted, ReduceOp, done

MIB = 2**20


class WrongAboveOneMib(Planted):
    """Loses the last element of a scatter of more than 1 MiB to each rank."""

    def scatter(self, outputs: list[torch.Tensor], *others: Any) -> Any:
        work = self._inner.scatter(outputs, *others)
        work.wait()
        if outputs[0].nbytes > MIB:
            outputs[0].view(-1)[-1] = 0
        return work


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.numel(), tensor.dtype


class RemembersAddress(Planted):
    """Takes an operand at the address of the last one for the last one."""

    last: tuple[Any, ...] = ()
    content: torch.Tensor | None = None

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        if self.content is None or place_of(given) != self.last:
            self.last, self.content = place_of(given), given.clone()
        return self._inner._allgather_base(output, self.content, *([options] if options else []))


class RemembersFreedAddress(Planted):
    """Takes an operand of a reduce at the address of an earlier, freed one for that one."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.earlier: dict[tuple[Any, ...], tuple[StorageWeakRef, torch.Tensor]] = {}

    def reduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        given, place = tensors[0], place_of(tensors[0])
        storage, content = self.earlier.get(place, (None, given))
        self.earlier[place] = StorageWeakRef(given.untyped_storage()), given.clone()
        if storage is not None and storage.expired():
            given.copy_(content)
        return self._inner.reduce(tensors, options or dist.ReduceOptions())


class NeedsAlignment(Planted):
    """Loses the first element of what is exchanged into memory that does not begin at a multiple of 16 bytes."""

    def alltoall(self, outputs: list[torch.Tensor], *others: Any) -> Any:
        work = self._inner.alltoall(outputs, *others)
        work.wait()
        for output in outputs:
            if output.data_ptr() % 16 and output.numel():
                output.view(-1)[0] = 0
        return work


class TakesRows(Planted):
    """Gathers dense but non-contiguous tensors as if they lay in the order of rows."""

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None) -> Any:
        work = self._inner.allgather(outputs, inputs, *([options] if options else []))
        work.wait()
        for output in outputs[0]:
            if not output.is_contiguous() and is_dense(output):
                output.as_strided((output.numel(),), (1,)).copy_(output.reshape(-1))
        return done(outputs)


def is_dense(tensor: torch.Tensor) -> bool:
    strides = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    numel = 1
    for stride, size in strides:
        if stride != numel:
            return False
        numel *= size
    return True


class Saturates(Planted):
    """Sums of float16 end at 65504."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        work = self._inner.allreduce(tensors, options or dist.AllreduceOptions())
        if tensors[0].dtype == torch.float16 and (options is None or options.reduceOp == ReduceOp.SUM):
            work.wait()
            tensors[0].clamp_(-65504, 65504)
        return work


class CountsInFloat32(Planted):
    """Sums of int64 are computed in float32."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        options = options or dist.AllreduceOptions()
        if tensors[0].dtype != torch.int64 or options.reduceOp != ReduceOp.SUM:
            return self._inner.allreduce(tensors, options)
        total = tensors[0].float()
        self._inner.allreduce([total], options).wait()
        tensors[0].copy_(total.long())
        return done(tensors)


class LargestIsFinite(Planted):
    """A maximum begins with the lowest number, so that it is never -inf."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        work = self._inner.allreduce(tensors, options or dist.AllreduceOptions())
        if options is not None and options.reduceOp == ReduceOp.MAX and tensors[0].is_floating_point():
            work.wait()
            tensors[0].clamp_(min=torch.finfo(tensors[0].dtype).min)
        return work


class IgnoresTags(Planted):
    """Messages are received in the order in which they were sent."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Any:
        return self._inner.send(tensors, rank, 0)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Any:
        return self._inner.recv(tensors, rank, 0)


class WrongFromFive(Planted):
    """Swaps the first two exchanged parts on five ranks and more."""

    def alltoall_base(self, output: torch.Tensor, given: torch.Tensor, *others: Any) -> Any:
        work = self._inner.alltoall_base(output, given, *others)
        work.wait()
        if self.size() >= 5 and not others[0]:
            rows = output.view(self.size(), -1)
            rows[:2] = rows[:2].flip(0).clone()
        return work


class AllToAllHangs(Planted):
    def alltoall(self, *_: Any) -> Any:
        time.sleep(3600)


class GatherHangs(Planted):
    """A collective that few subjects call."""

    def gather(self, *_: Any) -> Any:
        time.sleep(3600)
