"""A process group of MPI's collectives, all non-blocking: each is begun at once, and its work waits for it.

Data that only moves is moved as bytes.  Sums of 16-bit floats are made in float32 and rounded once, averages are sums
divided by the number of ranks.  An operand that is not contiguous is copied before, a result after.

Source: torch/csrc/distributed/c10d/PyProcessGroup.hpp (2.13.0), which names of methods are called; MPI 4.1, chapter 6.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist

from examples.mpi_backend.job import world_of
from examples.mpi_backend.work import Work, begun, no_result, outside

BACKEND = "mpi4py"
Tensor = torch.Tensor
ReduceOp = dist.ReduceOp

OPS = (
    (ReduceOp.SUM, "SUM"),
    (ReduceOp.AVG, "SUM"),
    (ReduceOp.PRODUCT, "PROD"),
    (ReduceOp.MIN, "MIN"),
    (ReduceOp.MAX, "MAX"),
    (ReduceOp.BAND, "BAND"),
    (ReduceOp.BOR, "BOR"),
    (ReduceOp.BXOR, "BXOR"),
)
TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.bool: "UINT8_T",
}
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


_Group: Any = dist.ProcessGroup  # torch's stub lists other constructors than the class has


class MpiGroup(_Group):  # type: ignore[misc]
    """A process group of MPI.

    Args:
        options: torch's options of the new group.
    """

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        world, store = world_of(options), options.store
        from mpi4py import MPI

        self._mpi, self._name, self._description = MPI, options.group_id, ""
        self._num_calls = 0
        store.set(f"rank {options.group_rank}", str(world.rank))
        ranks = [int(store.get(f"rank {number}")) for number in range(options.group_size)]
        self._comm = world.Create_group(world.group.Incl(ranks))

    @property
    def group_name(self) -> str:
        return str(self._name)

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getBackendName(self) -> str:
        return BACKEND

    def _get_sequence_number_for_group(self) -> int:
        return self._num_calls

    # Memory.

    def _bytes(self, tensor: Tensor) -> Any:
        return self._mpi.memory.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def _moved(self, tensor: Tensor) -> list[Any]:
        return [self._bytes(tensor), self._mpi.BYTE]

    def _parts(self, tensor: Tensor, numels: Sequence[int]) -> list[Any]:
        """One part for each rank, of so many elements, as bytes."""
        return [self._bytes(tensor), [numel * tensor.element_size() for numel in numels], self._mpi.BYTE]

    def _numbers(self, tensor: Tensor) -> list[Any]:
        return [self._bytes(tensor), tensor.numel(), getattr(self._mpi, TYPES[tensor.dtype])]

    def _begin(self, begin: Callable[[], Any], results: Any, finish: Callable[[], None], *kept: Any) -> Work:
        self._num_calls += 1
        return begun(Work([begin()], finish, results, (kept, results)))

    def _together(self, works: Sequence[Work], results: Any) -> Work:
        def finish() -> None:
            for work in works:
                work._finish()

        requests = list(itertools.chain.from_iterable(work._requests for work in works))
        return begun(Work(requests, finish, results, works))

    # Reductions.

    def _reduced(
        self, given: Tensor, op: Any, targets: Sequence[Tensor], call: Callable[[Any, Any, Any], Any], numel: int
    ) -> Work:
        """Reduces `given` to `numel` elements and writes them to the targets; none if this rank gets no result."""
        if op == ReduceOp.PREMUL_SUM:  # whose factor stands in what pickle is given, and nowhere else in Python
            with outside(), torch.no_grad():
                given, op = given * op.__getstate__()[1], ReduceOp.SUM
        names = [name for known, name in OPS if op == known]
        if not names or (given.dtype not in {*TYPES, *WIDE} and not given.is_complex()):
            raise NotImplementedError(f"{BACKEND} does not support this reduction of {given.dtype}")
        if self.size() == 1:  # float32 would change the bits of a NaN
            return self._begin(self._comm.Ibarrier, list(targets), lambda: _deal(given.clone(), targets[:1]))
        with outside(), torch.no_grad():
            sent = torch.view_as_real(given.contiguous()) if given.is_complex() else given
            numel *= 2 if given.is_complex() else 1
            sent = sent.to(WIDE.get(given.dtype, sent.dtype)).contiguous()
            got = sent.new_empty(numel)

        def finish() -> None:
            if op == ReduceOp.AVG:
                got.div_(self.size())
            found = torch.view_as_complex(got.view(-1, 2)) if given.is_complex() else got
            for target in targets:
                target.copy_(found.view(target.shape))

        begin = lambda: call(self._numbers(sent), self._numbers(got), getattr(self._mpi, names[0]))  # noqa: E731
        return self._begin(begin, list(targets), finish, sent, got)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work:
        op = ReduceOp.SUM if options is None else options.reduceOp
        return self._reduced(tensors[0], op, tensors, self._comm.Iallreduce, tensors[0].numel())

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any = None) -> Work:
        return self._together([self.allreduce([tensor], options) for tensor in tensors], tensors)

    def reduce(self, tensors: list[Tensor], options: Any) -> Work:
        targets = tensors if options.rootRank == self.rank() else []

        def call(sent: Any, got: Any, op: Any) -> Any:
            return self._comm.Ireduce(sent, got if targets else None, op, root=options.rootRank)

        return self._reduced(tensors[0], options.reduceOp, targets, call, tensors[0].numel())

    def reduce_scatter_single(self, output: Tensor, given: Tensor, options: Any = None) -> Work:
        op = ReduceOp.SUM if options is None else options.reduceOp
        return self._reduced_parts(given, op, [output.numel()] * self.size(), [output])

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], given: list[Tensor], options: Any = None) -> Work:
        pairs = zip(outputs, given, strict=True)
        return self._together([self.reduce_scatter_single(*pair, options) for pair in pairs], outputs)

    def reduce_scatter(self, outputs: list[Tensor], given: list[list[Tensor]], options: Any = None) -> Work:
        op = ReduceOp.SUM if options is None else options.reduceOp
        with outside(), torch.no_grad():
            joined = _joined(given[0])
        return self._reduced_parts(joined, op, _numels(given[0]), outputs)

    def _reduced_parts(self, given: Tensor, op: Any, numels: Sequence[int], targets: Sequence[Tensor]) -> Work:
        """Reduces as many elements for each rank; each rank gets its own part."""
        counts = [numel * (1 + given.is_complex()) for numel in numels]

        def call(sent: Any, got: Any, op: Any) -> Any:
            return self._comm.Ireduce_scatter(sent, got, counts, op)

        return self._reduced(given, op, targets, call, numels[self.rank()])

    # Moves.

    def _gathered(
        self, targets: Sequence[Tensor], given: Tensor, call: Callable[[Any, Any], Any], results: Any
    ) -> Work:
        """One part of each rank, to the targets, none on a rank that gets nothing."""
        with outside(), torch.no_grad():
            sent = given.contiguous()
            got = given.new_empty(sum(target.numel() for target in targets))
        counts = [target.numel() for target in targets]
        into = self._parts(got, counts) if targets else None
        return self._begin(lambda: call(self._moved(sent), into), results, lambda: _deal(got, targets), sent, got)

    def _exchanged(self, targets: Sequence[Tensor], given: Sequence[Tensor], results: Any) -> Work:
        """One part to each rank, and one of each."""
        with outside(), torch.no_grad():
            sent, got = _joined(given), given[0].new_empty(sum(target.numel() for target in targets))
        parts = [self._parts(*pair) for pair in ((sent, _numels(given)), (got, _numels(targets)))]
        return self._begin(lambda: self._comm.Ialltoallv(*parts), results, lambda: _deal(got, targets), sent, got)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        with outside(), torch.no_grad():
            passed = tensors[0].detach().clone(memory_format=torch.contiguous_format)
        begin = lambda: self._comm.Ibcast(self._moved(passed), root=options.rootRank)  # noqa: E731
        return self._begin(begin, tensors, lambda: _deal(passed, tensors[:1]), passed)

    def allgather(self, outputs: list[list[Tensor]], given: list[Tensor], options: Any = None) -> Work:
        return self._gathered(outputs[0], given[0], self._comm.Iallgatherv, outputs)

    def allgather_coalesced(self, outputs: list[list[Tensor]], given: list[Tensor], options: Any = None) -> Work:
        works = [self.allgather([[row[index] for row in outputs]], [each]) for index, each in enumerate(given)]
        return self._together(works, outputs)

    def all_gather_single(self, output: Tensor, given: Tensor, options: Any = None) -> Work:
        return self._gathered(_split(output, self.size()), given, self._comm.Iallgatherv, output)

    def all_gather_single_coalesced(self, outputs: list[Tensor], given: list[Tensor], options: Any = None) -> Work:
        pairs = zip(outputs, given, strict=True)
        return self._together([self.all_gather_single(*pair) for pair in pairs], outputs)

    def gather(self, outputs: list[list[Tensor]], given: list[Tensor], options: Any) -> Work:
        def call(sent: Any, got: Any) -> Any:
            return self._comm.Igatherv(sent, got, root=options.rootRank)

        return self._gathered(outputs[0] if options.rootRank == self.rank() else [], given[0], call, outputs)

    def scatter(self, outputs: list[Tensor], given: list[list[Tensor]], options: Any) -> Work:
        is_root = options.rootRank == self.rank()
        with outside(), torch.no_grad():
            got = torch.empty_like(outputs[0], memory_format=torch.contiguous_format)
            sent = _joined(given[0]) if is_root else None
        parts = None if sent is None else self._parts(sent, _numels(given[0]))
        begin = lambda: self._comm.Iscatterv(parts, self._moved(got), root=options.rootRank)  # noqa: E731
        return self._begin(begin, outputs, lambda: _deal(got, outputs[:1]), sent, got)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, got: Sequence[int], sent: Sequence[int], options: Any = None
    ) -> Work:
        with outside(), torch.no_grad():
            targets, parts = (
                list(torch.split(tensor, list(sizes or [tensor.shape[0] // self.size()] * self.size())))
                for tensor, sizes in ((output, got), (given, sent))
            )
        return self._exchanged(targets, parts, output)

    def alltoall(self, outputs: list[Tensor], given: list[Tensor], options: Any = None) -> Work:
        return self._exchanged(outputs, given, outputs)

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Work:
        with outside(), torch.no_grad():
            sent = tensors[0].contiguous()
        return self._begin(lambda: self._comm.Isend(self._moved(sent), target, tag), tensors, no_result, sent)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        with outside(), torch.no_grad():
            got = torch.empty_like(tensors[0], memory_format=torch.contiguous_format)
        begin = lambda: self._comm.Irecv(self._moved(got), source, tag)  # noqa: E731
        return self._begin(begin, tensors, lambda: _deal(got, tensors[:1]), got)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        return self.recv(tensors, self._mpi.ANY_SOURCE, tag)

    def barrier(self, opts: Any = None) -> Work:
        return self._begin(self._comm.Ibarrier, [], no_result)


def _numels(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def _split(output: Tensor, num: int) -> list[Tensor]:
    """Splits a tensor into so many equal parts, as views."""
    return list(output.view(num, output.numel() // num).unbind())


def _deal(found: Tensor, targets: Sequence[Tensor]) -> None:
    """Copies parts of the result to the targets, one after the other."""
    for target, part in zip(targets, torch.split(found.reshape(-1), _numels(targets)), strict=True):
        target.copy_(part.view(target.shape))
