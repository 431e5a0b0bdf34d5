"""A device written in Python, and a process group for it, so that tests of other devices than "cpu" run everywhere.

A tensor of the device is torch's own, with sizes, strides and a storage, but the storage has an address at which there
no memory.  Its bytes lie in a storage of the CPU that is attached to it, and the CPU's kernels compute on that.  A
kernel that takes the tensor for one of the CPU's ends the process.

torch's registration lets Python neither allocate nor resize a device's storage, nor make a generator.  So a storage is
made from its address, `UntypedStorage.resize_` and `nbytes` are replaced, and random numbers are the CPU's.

Source: torch/utils/backend_registration.py, `_setup_privateuseone_for_python_backend` (2.13.0, experimental), and
torch/csrc/acc/Module.cpp.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.programs.backend import Wrapper

DEVICE = "shadow"
BACKEND = "shadow"
"""The process group's."""

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_aten: Any = torch.ops.aten
_bindings: Any = torch._C
_addresses = itertools.count(1 << 56, 1 << 36)  # beyond what x86 and ARM map
_nbytes, _resize = torch.UntypedStorage.nbytes, torch.UntypedStorage.resize_


def host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the CPU with the same bytes, sizes and strides."""
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    return torch.empty(0, dtype=tensor.dtype).set_(_bytes_of(tensor.untyped_storage()), *place)


def adopt(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a tensor of the device that owns the bytes of a CPU tensor from now on."""
    made = _bindings._acc.create_empty_tensor((0,), tensor.dtype)
    storage = _storage_of(tensor.untyped_storage())
    return _set(made, storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _storage_of(held: torch.UntypedStorage) -> Any:
    """A storage of the device with a CPU storage attached; torch keeps the same object for it while it lives."""
    place = torch.device(DEVICE, 0)
    storage = _bindings._construct_storage_from_data_pointer(next(_addresses), place, _nbytes(held))
    storage._host = held
    return storage


def _bytes_of(storage: Any) -> torch.UntypedStorage:
    """The CPU's storage that is attached to a storage of the device.

    Raises:
        RuntimeError: it was freed, by resizing it to nothing.
    """
    if storage._host is None:
        raise RuntimeError("memory of the device is used that was freed")
    held: torch.UntypedStorage = storage._host
    return held


# Storages that are freed and made again, as fully_shard does.


def _resize_storage(storage: Any, size: int) -> Any:
    if storage.device.type != DEVICE:
        return _resize(storage, size)
    if size not in (0, _nbytes(storage)):
        raise NotImplementedError("a storage of this device can be freed and made again, but not of another size")
    storage._host = torch.UntypedStorage(size) if size == _nbytes(storage) else None
    return storage


def _size_of_storage(storage: Any) -> int:
    is_freed = storage.device.type == DEVICE and storage._host is None
    return 0 if is_freed else _nbytes(storage)


torch.UntypedStorage.resize_ = _resize_storage  # type: ignore[method-assign]
torch.UntypedStorage.nbytes = _size_of_storage  # type: ignore[method-assign]


# Operators: those that only say where elements lie are the CPU's, on the device's tensors; all others compute.


def _set(tensor: torch.Tensor, storage: Any, offset: int, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Gives the tensor that storage, and enlarges the storage if it is too small."""
    found: torch.Tensor = _aten.set_.source_Storage_storage_offset.redispatch(
        _CPU, tensor, storage, offset, size, stride
    )
    return found


def _empty(size: Sequence[int], *, dtype: Any = None, **others: Any) -> torch.Tensor:
    return adopt(torch.empty(size, dtype=dtype, memory_format=others.get("memory_format")))


def _empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **others: Any) -> torch.Tensor:
    return adopt(torch.empty_strided(size, stride, dtype=dtype))


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # noqa: FBT001, FBT002
    to, given = (host(each) if each.device.type == DEVICE else each for each in (target, source))
    with _disable_current_modes():
        to.copy_(given)
    return target


def _scalar(tensor: torch.Tensor) -> Any:
    return host(tensor).item()


spoils: dict[str, Callable[[Any], None]] = {}
"""Name of an operator -> change to its results: kernels that are wrong on purpose."""


def _like_cpu(operator: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: operator.redispatch(_CPU, *args, **kwargs)


def _compute(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes any operator on the CPU's bytes; results that are written in place go to the given tensors."""
    with _disable_current_modes():  # which a backward's thread would have see the CPU's kernels
        return _computed(operator, args, kwargs)


def _computed(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given: dict[int, torch.Tensor] = {}

    def lend(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type == DEVICE:
            lent = host(value)
            given[id(lent)] = value
            lending.append(lent)
            return lent
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == DEVICE else value

    def take(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return given[id(value)] if id(value) in given else adopt(value)

    lending: list[torch.Tensor] = []
    found = operator(*pytree.tree_map(lend, args), **pytree.tree_map(lend, kwargs))
    if (spoil := spoils.get(operator.overloadpacket.__name__)) is not None:
        spoil(found)
    for lent in lending:
        own = given[id(lent)]
        if lent.shape != own.shape or lent.stride() != own.stride():  # an out= that was resized
            _set(own, _storage_of(lent.untyped_storage()), lent.storage_offset(), lent.shape, lent.stride())
    return pytree.tree_map(take, found)


_everything = torch.library.Library("_", "IMPL")
_everything.fallback(_compute, "PrivateUse1")
_own = torch.library.Library("aten", "IMPL")
for _name in (
    *("as_strided", "view", "_reshape_alias", "unfold"),
    *("set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "set_"),
):
    _packet, _, _overload = _name.partition(".")
    _own.impl(_name, _like_cpu(getattr(getattr(_aten, _packet), _overload or "default")), "PrivateUse1")
for _name in torch._C._dispatch_get_all_op_names():  # otherwise computed in parts, and each part rounds
    _keys = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    _on_cpu, *_in_parts = (torch._C._dispatch_has_kernel_for_dispatch_key(_name, key) for key in _keys)
    if _name.startswith("aten::") and _on_cpu and any(_in_parts):
        _packet, _, _overload = _name.removeprefix("aten::").partition(".")
        _own.impl(_name, partial(_compute, getattr(getattr(_aten, _packet), _overload or "default")), "PrivateUse1")
_own.impl("empty.memory_format", _empty, "PrivateUse1")
_own.impl("empty_strided", _empty_strided, "PrivateUse1")
_own.impl("copy_", _copy, "PrivateUse1")
_own.impl("_local_scalar_dense", _scalar, "PrivateUse1")


# The device's module: one device, whose queue of work is always empty.


class Module:
    """The interface that torch gets by `torch.get_device_module`."""

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    set_device = synchronize = manual_seed_all = empty_cache = _nothing

    def get_device_name(self, index: int = 0) -> str:
        return "the CPU in the shadow"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def Stream(self, *args: Any, **kwargs: Any) -> Any:
        return torch.Stream(device=DEVICE)

    def Event(self, *args: Any, **kwargs: Any) -> Any:
        return torch.Event(device=DEVICE)

    def current_stream(self, device: Any = None) -> Any:
        return torch.accelerator.current_stream()

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext(stream)

    def device(self, index: Any) -> AbstractContextManager[Any]:
        return nullcontext(index)


_setup_privateuseone_for_python_backend(DEVICE, backend_module=Module())


# The process group: gloo on the device's bytes.


class Work(dist.Work):
    """gloo's work, with the device's tensors as results."""

    def __init__(self, inner: Any, results: list[torch.Tensor]) -> None:
        super().__init__()
        self._inner, self._results = inner, results

    def wait(self, *args: Any) -> bool:
        with _disable_current_modes():
            return bool(self._inner.wait(*args))

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def result(self) -> list[torch.Tensor]:
        return self._results

    def get_future(self) -> Any:
        return self._inner.get_future().then(lambda _: self._results)


class Group(Wrapper):
    """A process group that has gloo do its work, on the bytes of the device's tensors."""

    def getBackendName(self) -> str:
        return BACKEND

    def _get_sequence_number_for_group(self) -> int:
        return int(self._inner._get_sequence_number_for_group())


def _on_bytes(name: str) -> Callable[..., Any]:
    """Returns the method with that name of gloo's group, applied to the bytes of its arguments."""

    def method(self: Group, *args: Any, **kwargs: Any) -> Any:
        given = pytree.tree_leaves(args[:1])
        with _disable_current_modes():  # gloo's own calls, on tensors of the CPU, must reach no mode
            work = getattr(self._inner, name)(*pytree.tree_map(_lent, args), **pytree.tree_map(_lent, kwargs))
        return Work(work, given) if isinstance(work, dist.Work) else work

    return method


def _lent(value: Any) -> Any:
    return host(value) if isinstance(value, torch.Tensor) and value.device.type == DEVICE else value


for _name in dir(dist.ProcessGroup):
    if _name.lstrip("_").startswith(("all", "reduce", "gather", "scatter", "send", "recv", "broadcast", "barrier")):
        setattr(Group, _name, _on_bytes(_name))

dist.Backend.register_backend(BACKEND, lambda options, _: Group(options), extended_api=True, devices=[DEVICE])
