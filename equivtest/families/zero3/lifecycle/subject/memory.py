"""Measures the memory of all storages that were made while the `Meter` was active and are still alive."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from equivtest.base import limits


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every storage that a torch operator makes while this mode is active. It never keeps a storage alive.

    A storage is alive as long as Python, autograd or a running collective refers to it. torch keeps the storage's
    Python object for the same time (2.13.0).

    Args:
        others: Tensors whose memory does not count.
    """

    def __init__(self, others: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._others = set(storages(others))
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(given):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self._others:
                storage = tensor.untyped_storage()
                self._seen[storage.data_ptr()] = weakref.ref(storage)
        return given

    def alive(self) -> dict[int, int]:
        """Maps the address of each recorded storage that is still alive to its number of bytes."""
        found = ((address, storage()) for address, storage in self._seen.items())
        return {address: storage.nbytes() for address, storage in found if storage is not None}

    def unaccounted(self, tensors: Iterable[torch.Tensor]) -> int:
        """Returns the bytes of recorded storages that are alive and not behind `tensors`.

        Waits until the backend's threads have released their storages, at most limits.SETTLE_S.
        """
        accounted, until_s = storages(tensors), time.monotonic() + limits.SETTLE_S
        while True:
            size = sum(size for address, size in self.alive().items() if address not in accounted)
            if not size or time.monotonic() > until_s:
                return size
            time.sleep(limits.SETTLE_S / 100)


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Maps the address of each storage behind the tensors to its number of bytes."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found}
