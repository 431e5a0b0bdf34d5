"""Faults of a rank, and a visit that causes them on chosen ranks at a chosen moment."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from equivtest.ranks.backend import Backend
from equivtest.ranks.reply import Answer
from equivtest.tensors import Placed
from tests.programs import tiny as tiny_programs
from tests.programs.tiny import PlainCase, meet

MOMENTS = ("before", "during", "after")
"""Relative to the peers' collective: the culprits fail before any rank is in it, while their peers wait
in it, or when all have left it."""
FLOOD_BYTES = 100 * 2**20
_hoard: list[bytearray] = []


@dataclass(frozen=True, kw_only=True)
class FaultCase(PlainCase):
    """A case in which the culprits cause the fault that the subject names.

    Attributes:
        late_s: Delay of a rank that answers late.
    """

    culprits: tuple[int, ...] = ()
    moment: str = "before"
    late_s: float = 0.0


def visit(subject: str, case: FaultCase, backend: Backend) -> tuple[Answer, ...]:
    """Every rank takes part in one collective and answers with its process id; culprits fail."""
    is_culprit = dist.get_rank() in case.culprits
    size = 0
    if case.moment == "after":
        meet()
    elif case.moment == ("during" if is_culprit else "before"):
        time.sleep(0.15)
    if is_culprit:
        fault = FAULTS[subject]
        size = (fault(case.late_s) if fault is answers_late else fault()) or 0
    if case.moment != "after" and not (is_culprit and subject == "skips_collective") and subject != "enters_alone":
        meet()
    if not is_culprit and case.moment == "after" and subject in ("enters_other", "enters_longer", "skips_collective"):
        meet()
    local = torch.tensor([os.getpid(), size], dtype=torch.float64)
    return (Answer({"output": Placed(local, case.layouts()["output"], (2,))}),)


def raises() -> None:
    raise ValueError("the culprit's own words")


def raises_system_exit() -> None:
    sys.exit(0)


def exits_0() -> None:
    os._exit(0)


def exits_3() -> None:
    os._exit(3)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crashes() -> None:
    ctypes.string_at(0)


def lacks_memory() -> None:
    """Asks for more than the system gives."""
    _limit_memory(2**26)
    torch.empty(2**32)


def eats_memory() -> None:
    """Takes all memory there is and keeps it: nothing is left for telling about it."""
    _limit_memory(2**26)
    size = 2**20
    while size > 64:
        try:
            _hoard.append(bytearray(size))
        except MemoryError:
            size //= 2
    raise MemoryError


def _limit_memory(more_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def hangs() -> None:
    while True:
        time.sleep(0.01)


def hangs_in_c() -> None:
    """Never gives the interpreter back: no Python thread of the rank runs any more."""
    while True:
        ctypes.PyDLL(None).sleep(600)


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def enters_alone() -> None:
    dist.all_gather_into_tensor(torch.empty(dist.get_world_size()), torch.ones(1))


def enters_other() -> None:
    dist.all_gather_into_tensor(torch.empty(dist.get_world_size()), torch.ones(1))


def enters_longer() -> None:
    """The collective of its peers, but with more elements than they bring."""
    dist.all_reduce(torch.ones(5000))


def skips_collective() -> None:
    """Answers without having entered the collective that its peers wait in."""


def answers_late(late_s: float) -> None:
    time.sleep(late_s)


def answers_twice() -> None:
    tiny_programs.answers_twice(PlainCase(world_size=1))


def floods() -> int:
    return _flood(lambda: print("x" * 2**20, file=sys.stderr))


def floods_from_c() -> int:
    return _flood(lambda: os.write(1, b"x" * 2**20))


def _flood(write: Callable[[], object]) -> int:
    """Writes FLOOD_BYTES; the most that the file took meanwhile, in bytes."""
    largest = 0
    for _ in range(FLOOD_BYTES // 2**20):
        write()
        largest = max(largest, os.fstat(1).st_size)
    return largest


FAULTS: dict[str, Callable[..., int | None]] = {
    fault.__name__: fault
    for fault in (
        raises, raises_system_exit, exits_0, exits_3, is_killed, crashes, lacks_memory, eats_memory, hangs, hangs_in_c,
        is_stopped, enters_alone, enters_other, enters_longer, skips_collective, answers_late, answers_twice, floods,
        floods_from_c,
    )
}  # fmt: skip
FAULTS["nothing"] = lambda: None
