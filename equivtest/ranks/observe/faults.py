"""Defines a process group that can spoil one collective. An audit runs a program on such groups.

The class is a Python subclass of torch's ProcessGroup around a group of the real backend. Therefore it sees the calls
that DistributedDataParallel's reducer and FSDP2 make from C++. Without a planned fault the group only records calls.

Source: torch/csrc/distributed/c10d/PyProcessGroup.hpp and torch/distributed/distributed_c10d.py,
_new_process_group_helper (2.13.0).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import IO, Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

from equivtest.base.collective import Collective
from equivtest.errors import EquivtestError
from equivtest.ranks.messages import FAULTS, Fault
from equivtest.ranks.observe.moves import BARRIERS, CALLS, FROM_ANY, Call, flat_tensors
from equivtest.ranks.observe.watching import Watch
from equivtest.tensors import same_bits

BACKEND = "equivtest_faults"
"""Name under which the group is registered with torch."""
COMPARED = ("broadcast", "all_gather")
"""Kinds of collective whose spoiled results are compared with the right results.

If all ranks pass equal values, a fault in such a call changes nothing, so a claim cannot reject it.  Example:
DistributedDataParallel begins with a broadcast of parameters that are already equal.  A reduction is not compared,
because one that adds up equal values shows that all ranks have the same batch.
"""


class CannotSpoil(EquivtestError):
    """Raised if the backend cannot send one rank's operand to another rank. The subject is not to blame."""


@dataclass
class Visit:
    """State of this rank while a subject runs, with the planned fault and the collectives called so far."""

    fault: Fault = field(default_factory=Fault)
    called: list[Collective] = field(default_factory=list)
    is_known: bool = False  # True if the groups of this rank are of this module
    watch: Watch | None = None


_visit = Visit()
_lock = threading.Lock()  # a backward calls from another thread


def plan(fault: Fault) -> None:
    """Sets the fault to plant in each later run of a subject, until the next call of this function."""
    _visit.fault = fault
    begin()


@contextmanager
def watched(file: IO[bytes] | None) -> Iterator[None]:
    """Makes this rank note its collectives and operations in `file` while the context lasts.

    If `file` is None, the context does nothing.
    """
    if file is None:
        yield
        return
    _visit.watch = Watch(file)
    try:
        yield
    finally:
        _visit.watch.close()
        _visit.watch = None


def operations() -> AbstractContextManager[Any]:
    return nullcontext() if _visit.watch is None else _visit.watch.operations()


def begin() -> None:
    """Marks the beginning of a subject's run. The numbers of collectives start at 0 again."""
    _visit.called = []


def called() -> tuple[Collective, ...] | None:
    """Returns the collectives that the subject has called so far, in order, or None if they were not recorded.

    Collectives are recorded if the groups of this rank are `FaultyGroup`s.
    """
    return tuple(_visit.called) if _visit.is_known else None


def register(backend: str, device: str) -> str:
    """Registers `FaultyGroup` with torch. Returns the name for init_process_group.

    torch's flight recorder is off: torch 2.15.0 attaches the recorder to each group with devices, and raises for a
    Python subclass of ProcessGroup (`_maybe_attach_flight_recorder` of distributed_c10d.py).
    """
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"

    def make(options: Any, _: object) -> FaultyGroup:
        return FaultyGroup(backend, options)

    _visit.is_known = True
    dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=list(dict.fromkeys(("cpu", device))))
    return BACKEND


_Group: Any = dist.ProcessGroup  # torch's stub lists wrong constructors


class FaultyGroup(_Group):  # type: ignore[misc]
    """A process group that passes every call, except the planned one, on to a group of the real backend."""

    def __init__(self, backend: str, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._name = options.group_id
        self._description = ""
        self._num_calls = 0
        place = (options.group_size, options.group_rank, options.global_ranks_in_group)
        name: Any = f"{options.group_id} within"
        self._inner, _ = distributed_c10d._new_process_group_helper(
            *place, backend, options.store, name, timeout=options.timeout
        )

    @property
    def group_name(self) -> str:
        return str(self._name)

    @property
    def group_desc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> Any:
        """Devices of the real group. `set_model_state_dict` reads them with broadcast_from_rank0 (torch 2.13.0)."""
        return self._inner._device_types

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getBackendName(self) -> str:
        return BACKEND

    def _get_sequence_number_for_group(self) -> int:
        """Returns the number of calls of collectives, with the spoiled calls."""
        return self._num_calls

    def _end_coalescing(self, *arguments: Any) -> Work:
        work = self._inner._end_coalescing(*arguments)
        return work if _visit.watch is None else _visit.watch.coalesced(work)

    def _call(self, name: str, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
        """Passes one call on to the real group, or spoils the planned call. Returns the work of the call.

        Calls are numbered in order. A call on a group of one rank is never spoiled, and gets no number.
        """
        call = CALLS[name]

        def hand_on(arguments: Sequence[Any]) -> Work:
            return getattr(self._inner, name)(*arguments, **named)

        if _visit.watch is not None:
            self._num_calls += 1
            return _visit.watch.collective(self, name, call, arguments, hand_on, named)
        if self.size() == 1:
            self._num_calls += 1
            return hand_on(arguments)
        with _lock:
            self._num_calls += 1
            index = len(_visit.called)
            _visit.called.append(self._seen(call, arguments))
        fault = _visit.fault

        if fault.index != index:
            return hand_on(arguments)
        with torch.no_grad():
            right = _results_of(call, hand_on, arguments) if call.kind in COMPARED else None
            work = _SPOILED[fault.kind](self, call, hand_on, arguments)
            if right is not None and all(map(same_bits, right, flat_tensors(call.results(arguments)))):
                _visit.called[index] = replace(_visit.called[index], is_unchanged=True)
            return work

    def _seen(self, call: Call, arguments: Sequence[Any]) -> Collective:
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in flat_tensors(call.operands(arguments)))
        phase = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
        return Collective(call.kind, size_bytes, phase, self._in_words())

    def _in_words(self) -> str:
        return self._description if self._description.startswith("mesh_") else f"{self.size()} ranks"


Work = Any
HandOn = Callable[[Sequence[Any]], Work]
"""Function that calls the same collective of the real group, with these arguments."""


def _results_of(call: Call, hand_on: HandOn, arguments: Sequence[Any]) -> list[torch.Tensor]:
    """Makes the call, returns copies of its results, and leaves all tensors of the call as they were."""
    tensors = [*flat_tensors(call.operands(arguments)), *flat_tensors(call.results(arguments))]
    before = [tensor.clone() for tensor in tensors]
    _wait(hand_on(arguments))
    results = [tensor.clone() for tensor in flat_tensors(call.results(arguments))]
    for tensor, values in zip(tensors, before, strict=True):
        tensor.copy_(values)
    return results


def _own_operand(group: FaultyGroup, call: Call, hand_on: HandOn, arguments: Sequence[Any]) -> Work:
    call.repeat_own(arguments, group.rank(), group.size())
    return _done(group, call, arguments)


def _dropped(group: FaultyGroup, call: Call, hand_on: HandOn, arguments: Sequence[Any]) -> Work:
    call.keep_own(arguments, group.rank())
    return _done(group, call, arguments)


def _poisoned(group: FaultyGroup, call: Call, hand_on: HandOn, arguments: Sequence[Any]) -> Work:
    for tensor in flat_tensors(call.results(arguments)):
        tensor.fill_(torch.nan if tensor.is_floating_point() else _odd_one(tensor.dtype))
    return _done(group, call, arguments)


def _odd_one(dtype: torch.dtype) -> int:
    return -1 if dtype.is_signed else 1 if dtype is torch.bool else torch.iinfo(dtype).max


def _doubled(group: FaultyGroup, call: Call, hand_on: HandOn, arguments: Sequence[Any]) -> Work:
    _wait(hand_on(arguments))
    for tensor in flat_tensors(call.results(arguments)):
        tensor.mul_(2)
    return _done(group, call, arguments)


def _another_operand(group: FaultyGroup, call: Call, hand_on: HandOn, arguments: Sequence[Any]) -> Work:
    """Spoils a call. The first rank passes the second rank's operand, or zeros if the operands' sizes differ."""
    operands = flat_tensors(call.operands(arguments))
    try:
        others = [_of_second_rank(group, tensor) for tensor in operands]
    except Exception as error:  # a backend may raise anything
        raise CannotSpoil(f"{type(error).__name__}: {error}") from error
    given = call.giving(arguments, others if group.rank() == 0 else operands)
    _wait(hand_on(given))
    return _done(group, call, given)


def _of_second_rank(group: FaultyGroup, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the values that the second rank of the group has in this tensor.

    If the ranks' tensors differ in size, the values are zeros.

    All ranks of the group must call this function together.
    """
    inner = group._inner
    sizes = torch.tensor([tensor.numel(), -tensor.numel()], device=tensor.device)
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    _wait(inner.allreduce([sizes], options))
    if int(sizes[0]) != -int(sizes[1]):
        return torch.zeros_like(tensor)
    operand = tensor.detach().clone(memory_format=torch.contiguous_format)
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 1, 0
    _wait(inner.broadcast([operand], options))
    return operand


class Taken(dist.Work):
    """The finished work of a receive from any rank. It names the next rank as the sender."""

    def __init__(self, group: FaultyGroup) -> None:
        super().__init__()
        self._source: int = (group.rank() + 1) % group.size()

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def _source_rank(self) -> int:
        return self._source


_SPOILED = dict(zip(FAULTS, (_own_operand, _another_operand, _dropped, _poisoned, _doubled), strict=True))


def _wait(work: Work) -> None:
    if work is not None:
        work.wait()


def _done(group: FaultyGroup, call: Call, arguments: Sequence[Any]) -> Work:
    """Returns a finished work with the results, because DistributedDataParallel reads them from the work."""
    if call is CALLS[FROM_ANY]:
        return Taken(group)
    future: Any = torch.futures.Future()
    future.set_result(flat_tensors(call.results(arguments)))
    bindings: Any = torch._C._distributed_c10d
    return bindings._create_work_from_future(future)


def _method(name: str) -> Callable[..., Work]:
    def method(self: FaultyGroup, *arguments: Any, **named: Any) -> Work:
        return self._call(name, arguments, named)

    return method


def _handed_on(name: str) -> Callable[..., Any]:
    def method(self: FaultyGroup, *arguments: Any, **named: Any) -> Any:
        return getattr(self._inner, name)(*arguments, **named)

    return method


def _barrier(name: str) -> Callable[..., Any]:
    def method(self: FaultyGroup, *arguments: Any, **named: Any) -> Any:
        def hand_on() -> Any:
            return getattr(self._inner, name)(*arguments, **named)

        return hand_on() if _visit.watch is None else _visit.watch.barrier(self, name, hand_on)

    return method


HANDED_ON = (
    "_start_coalescing", "_set_sequence_number_for_group",
    "_wait_for_pending_works", "_get_backend", "abort", "shutdown",
)  # fmt: skip
"""Methods that are no collectives and that the real group has to answer; the base class would ask a missing backend."""

for _name in CALLS.keys() & set(dir(dist.ProcessGroup)):
    setattr(FaultyGroup, _name, _method(_name))
for _name in set(BARRIERS) & set(dir(dist.ProcessGroup)):
    setattr(FaultyGroup, _name, _barrier(_name))
for _name in set(HANDED_ON) & set(dir(dist.ProcessGroup)):
    setattr(FaultyGroup, _name, _handed_on(_name))
