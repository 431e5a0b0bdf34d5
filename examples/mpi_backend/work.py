"""The work that a call of the group begins: requests of MPI, and the memory that they read and write.

MPI reads and writes it until the last of the requests has ended (MPI 4.1, section 3.7.3), whether the program waits for
the work or drops it, for example after an exception.  So a work that was begun is kept here until then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed as dist
from torch.futures import Future
from torch.utils._python_dispatch import _disable_current_modes

LOOKS = 20  # at a request before its rank lets others have the core
PAUSE_S = 5e-5


def outside() -> AbstractContextManager[Any]:
    """The group's own copies are no operations of the program that is watched."""
    return _disable_current_modes()


class Work(dist.Work):
    """Requests of MPI, and the result once the last of them has ended.

    Args:
        kept: Memory that MPI reads and writes until then.
    """

    def __init__(self, requests: Sequence[Any], finish: Callable[[], None], results: Any, kept: Any) -> None:
        super().__init__()
        self._requests, self._finish, self._results, self._kept = list(requests), finish, results, kept

    def wait(self, *_: Any) -> bool:
        looks = 0
        while not self.is_completed():
            looks += 1
            if looks > LOOKS:
                time.sleep(PAUSE_S)
        return True

    def is_over(self) -> bool:
        """True if MPI has done its part."""
        self._requests = [request for request in self._requests if not request.Test()]
        return not self._requests

    def is_completed(self) -> bool:
        if not self.is_over():
            return False
        finish, self._finish, self._kept = self._finish, no_result, None
        _begun.pop(id(self), None)
        with outside(), torch.no_grad():
            finish()
        return True

    def is_success(self) -> bool:
        return self.is_completed()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self._results

    def get_future(self) -> Any:
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self._results)
        return future


def no_result() -> None:
    """The work of a call that leaves no result on this rank."""


def begun(work: Work) -> Work:
    """Keeps the work, and with it its memory, until it is completed, or MPI has done its part of a dropped one."""
    for each in [each for each in _begun.values() if each.is_over()]:
        _begun.pop(id(each), None)
    _begun[id(work)] = work
    return work


_begun: dict[int, Work] = {}
