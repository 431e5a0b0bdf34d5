"""Notes in a file each computation and each collective of a rank in one visit, with all operands.

`equivtest.diagnose.blame` reads the notes to find the call that a failure comes from.  Each collective, each operator
on DTensors and each local operation has a note of its beginning and a note of its end. So the notes also show a call
that never ends.

Source: torch.utils._python_dispatch.TorchDispatchMode (2.13.0) for operators and local operations, also in a backward;
`equivtest.ranks.observe.faults` sees collectives, because DistributedDataParallel calls them from C++.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
from torch import distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from equivtest.base import limits
from equivtest.base.refusal import in_short
from equivtest.errors import Misuse
from equivtest.ranks.layouts import layout_of
from equivtest.ranks.observe.moves import Call, factor_of, flat_tensors
from equivtest.ranks.observe.notes import (
    BEGUN,
    COLLECTIVE,
    ENDED,
    OPERATION,
    OPERATOR,
    RAISED,
    Note,
    Part,
    packed,
    write_note,
)
from equivtest.tensors import same_bits

UNSEEN = ("empty", "as_strided", "set_", "resize", "detach", "alias")
"""Parts of names of operators that are not noted.

They return no values, or their results depend on the operands' memory layout.
"""

HANDLERS = ("torch.distributed.tensor._dispatch", "torch.distributed.tensor._tp_conv")
"""Modules of the handlers with which DTensor computes some operators without a sharding rule.

Handlers of other modules, such as loss_parallel, give an operator another meaning while a context lasts. Source:
OpDispatcher.__init__ in torch/distributed/tensor/_dispatch.py, and torch/distributed/tensor/parallel/loss.py (2.13.0).
"""

PLACEMENTS = ("Shard", "_StridedShard", "Replicate", "Partial")
"""Classes of placements from which a whole tensor can be put together.

_MaskPartial and _NormPartial are not among them (2.13.0).
"""

REDUCTIONS = {
    getattr(dist.ReduceOp, op): op.lower() for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
} | {dist.ReduceOp.PREMUL_SUM: "premul"}


class Watch:
    """Writes the notes of this rank on one visit.

    Args:
        file: File for the notes. The watch closes the file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.numbers = itertools.count()
        self._lock = threading.Lock()  # a backward and a collective's callback run in other threads
        self._unended: list[Callable[[], None]] = []

    def close(self) -> None:
        self._file.close()

    @property
    def is_full(self) -> bool:
        """True if the file is closed or so large that no further operations are noted."""
        return self._file.closed or self._file.tell() > limits.WATCHED_BYTES

    def note(self, **fields: Any) -> None:
        with self._lock:
            if not self._file.closed:  # a collective without a wait may end late
                write_note(Note(**fields), self._file)

    def operations(self) -> AbstractContextManager[Any]:
        return Operations(self)

    # Collectives.

    def collective(
        self,
        group: Any,
        name: str,
        call: Call,
        arguments: Sequence[Any],
        hand_on: Callable[[Sequence[Any]], Any],
        named: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Calls a collective of the real group. Notes its operands, and its results once the collective is complete.

        The result is the work of the call. For a part of a coalesced call the result is None, because only the whole
        call has a work.

        Args:
            hand_on: Function of the arguments that calls the real group.
            named: Keyword arguments, only for the note. `hand_on` itself passes them to the real group.
        """
        with _disable_current_modes():
            number = next(self.numbers)
            operands = call.operands(arguments)
            held = [tensor.detach().clone() for tensor in flat_tensors(operands)]
            room = [tensor.numel() for tensor in flat_tensors(call.results(arguments))]
            self.note(
                number=number,
                moment=BEGUN,
                kind=COLLECTIVE,
                name=name,
                given=packed(operands),
                group=tuple(dist.get_process_group_ranks(group)),
                options={**_options_of([*arguments, *_in_order(named)]), "group_name": group.group_name, "room": room},
            )
            try:
                work = hand_on(arguments)
            except Exception as error:
                self.note(number=number, moment=RAISED, error=_in_short(error))
                raise
        is_in_place = call.operand == call.result or _overlap(operands, call.results(arguments))

        def end() -> None:
            now = flat_tensors(operands)
            was_changed = not is_in_place and not all(map(same_bits, held, now))
            self.note(number=number, moment=ENDED, got=packed(call.results(arguments)), was_changed=was_changed)

        if work is None:  # a part of a coalesced call
            self._unended.append(end)
            return None
        return Watched(work, [end], lambda error: self.note(number=number, moment=RAISED, error=_in_short(error)))

    def barrier(self, group: Any, name: str, hand_on: Callable[[], Any]) -> Any:
        """Calls a barrier of the real group. Notes when the barrier was called and when it ended.

        The result is the work of the call, or None for a monitored_barrier, which has no work.
        """
        number = next(self.numbers)
        self.note(
            number=number,
            moment=BEGUN,
            kind=COLLECTIVE,
            name=name,
            given=[],
            group=tuple(dist.get_process_group_ranks(group)),
            options={**_phase(), "clock": _clock(), "group_name": group.group_name},
            at_s=time.monotonic(),
        )

        def failed(error: Exception) -> None:
            self.note(number=number, moment=RAISED, error=_in_short(error))

        def end() -> None:
            self.note(number=number, moment=ENDED, got=[], at_s=time.monotonic())

        try:
            work = hand_on()
        except Exception as error:
            failed(error)
            raise
        if work is None:  # monitored_barrier, which has already waited
            end()
            return None
        return Watched(work, [end], failed)

    def coalesced(self, work: Any) -> Any:
        """Wraps and returns the work of a coalesced call. Once the call is complete, all its results are noted."""
        ends, self._unended = self._unended, []
        return work if work is None else Watched(work, ends, lambda error: None)


class Watched(dist.Work):
    """Wraps a work of the real group, and notes the results once the program learns that the work is complete."""

    def __init__(self, work: Any, ends: Sequence[Callable[[], None]], failed: Callable[[Exception], None]) -> None:
        super().__init__()
        self._work, self._ends, self._failed = work, list(ends), failed

    def _end(self) -> None:
        ends, self._ends = self._ends, []
        with _disable_current_modes(), torch.no_grad():
            for end in ends:
                end()

    def wait(self, *args: Any) -> bool:
        try:
            done = self._work.wait(*args)
        except Exception as error:
            self._failed(error)
            raise
        self._end()
        return bool(done)

    def get_future(self) -> Any:
        def ended(future: Any) -> Any:
            value = future.value()
            self._end()
            return value

        return self._work.get_future().then(ended)

    def is_completed(self) -> bool:
        is_done = bool(self._work.is_completed())
        if is_done and self._work.exception() is None:  # the program may write to the results without a wait
            self._end()
        return is_done

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> Any:
        return self._work.result()

    def synchronize(self) -> None:
        self._work.synchronize()

    def _source_rank(self) -> int:
        return int(self._work._source_rank())


def _options_of(arguments: Sequence[Any]) -> dict[str, Any]:
    found: dict[str, Any] = _phase()
    for argument in arguments:
        operation = getattr(argument, "reduceOp", None)
        if operation is not None:
            found["op"] = next((word for op, word in REDUCTIONS.items() if operation == op), "unknown")
            if found["op"] == "premul":
                found["factor"] = factor_of(operation)
        if hasattr(argument, "rootRank"):
            found["root"] = argument.rootRank
    found["numbers"] = packed([argument for argument in arguments[1:] if _isnumbers(argument)])
    return found


def _in_order(named: Mapping[str, Any]) -> list[Any]:
    return [named[name] for name in sorted(named, key=lambda name: (name == "tag", name))]


def _isnumbers(argument: Any) -> bool:
    if isinstance(argument, list | tuple):
        return all(isinstance(part, int) for part in argument)
    return isinstance(argument, int)


def _phase() -> dict[str, Any]:
    return {"phase": "backward" if torch._C._current_graph_task_id() != -1 else "forward"}


def _clock() -> str:
    """Returns the boot id of this rank's host. Ranks with the same boot id have the same monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _overlap(operands: Any, results: Any) -> bool:
    given = {tensor.untyped_storage().data_ptr() for tensor in flat_tensors(operands)}
    return any(tensor.untyped_storage().data_ptr() in given for tensor in flat_tensors(results))


def _in_short(error: Exception) -> str:
    return in_short(error)[: limits.OUTPUT_CHARS]


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that notes every operator of torch on DTensors, and every local operation on plain tensors."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch
        self._entering = threading.local()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return self._of_dtensors(func, args, kwargs or {})
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        if not _is_seen(func) or not _is_computed(types, (args, kwargs)) or self._watch.is_full:
            return func(*args, **(kwargs or {}))
        return self._watched(func, args, kwargs or {})

    def _of_dtensors(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Writes notes about an operator on DTensors, and lets DTensor compute the operator.

        This mode stays on meanwhile, so it also notes the local operations and collectives that DTensor calls.
        """
        is_noted, self._entering.is_noted = getattr(self._entering, "is_noted", False), False
        mesh = _mesh_of((args, kwargs))
        if is_noted or mesh is None or not _is_seen(func) or _has_another_meaning(func) or self._watch.is_full:
            return NotImplemented
        watch, number = self._watch, next(self._watch.numbers)
        written, _ = _by_use(func, args, kwargs)
        watch.note(
            number=number,
            moment=BEGUN,
            kind=OPERATOR,
            name=str(func),
            given=packed(_in_parts([args, list(kwargs.items())])),
            group=tuple(mesh.mesh.flatten().tolist()),
            options=_phase(),
        )
        self._entering.is_noted = True
        try:
            with self:
                found = func(*args, **kwargs)
        except Exception as error:
            watch.note(number=number, moment=RAISED, error=_in_short(error))
            raise
        order = {"order": next(watch.numbers)}
        watch.note(number=number, moment=ENDED, got=packed(_in_parts([found, written])), options=order)
        return found

    def _watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch, number = self._watch, next(self._watch.numbers)
        written, kept = _by_use(func, args, kwargs)
        before = packed(kept)
        given = packed([args, list(kwargs.items())])
        watch.note(number=number, moment=BEGUN, kind=OPERATION, name=str(func), given=given, options=_phase())
        try:
            found = func(*args, **kwargs)
        except Exception as error:
            watch.note(number=number, moment=RAISED, error=_in_short(error))
            raise
        got = packed([found, written])
        watch.note(number=number, moment=ENDED, got=got, was_changed=packed(kept) != before)
        return found


def _by_use(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Splits an operator's arguments into two lists, the arguments to which the operator writes and all others."""
    arguments = func._schema.arguments
    named = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    used: tuple[list[Any], list[Any]] = ([], [])
    for argument in arguments:
        is_kept = argument.alias_info is None or not argument.alias_info.is_write
        used[is_kept].extend([named[argument.name]] if argument.name in named else [])
    return used


def _is_computed(types: Sequence[type], given: Any) -> bool:
    """True if an operation computes values.

    The operation computes no values if one of its tensors is fake, on "meta", or of an unknown subclass.
    """
    has_fakes = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    is_plain = all(kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) for kind in types)
    return is_plain and not has_fakes and not any(getattr(each, "is_meta", False) for each in tree_leaves(given))


def _is_seen(func: Any) -> bool:
    """True for an operator of torch itself whose results depend on nothing but the operands' values."""
    name = func.overloadpacket.__name__
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    return func.namespace == "aten" and not is_random and not any(part in name for part in UNSEEN)


def _mesh_of(given: Any) -> Any:
    """Returns the mesh of the first DTensor.

    The result is None if this rank is outside the mesh, or if the local tensor has no values.
    """
    first = next(each for each in tree_leaves(given) if isinstance(each, DTensor))
    local = first._local_tensor
    has_values = isinstance(local, AsyncCollectiveTensor) or _is_computed([type(local)], [local])
    return first.device_mesh if has_values and first.device_mesh.get_coordinate() is not None else None


def _has_another_meaning(func: Any) -> bool:
    handler = DTensor._op_dispatcher._custom_op_handlers.get(func)
    return handler is not None and handler.__module__ not in HANDLERS


def _in_parts(value: Any) -> Any:
    """Returns nested lists with a `Part` for each DTensor, or the DTensor's spec if parts cannot make up the whole."""
    if isinstance(value, list | tuple):
        return [_in_parts(each) for each in value]
    if not isinstance(value, DTensor):
        return value
    mesh, local = value.device_mesh, value._local_tensor
    try:
        layout = layout_of(value, "a DTensor")
    except Misuse:
        return value._spec
    if any(type(placement).__name__ not in PLACEMENTS for placement in value.placements):
        return value._spec
    local = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
    return Part(local, layout, tuple(value.shape), tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))
