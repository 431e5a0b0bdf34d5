"""Groups of gloo with one worker thread each, since with two torch may free a string twice.

By default two threads of a group take collectives off its queue.  After each one a thread assigns its name to
a string that both share, under no lock: ProcessGroupGloo::runLoop, as read in the library of torch 2.13.0.
libstdc++ keeps names of up to 15 characters within the string; ALLGATHER_COALESCED, that of a functional
all_gather, lies in memory of its own, which two threads at once free twice.  Finding 39 has a program
without equivtest that dies of it, and `tests/ranks/test_gloo.py` fails on the day when it no longer does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

WORKERS = 1
"""Threads of each group that run collectives; torch takes two for each network interface (2.13.0)."""
TIMEOUT = timedelta(minutes=30)
"""Torch's default for a group of gloo."""


def let_senders_finish() -> None:
    """From now on a thread of this process that wakes up does not take the core from one that runs; Linux alone can.

    Gloo's own thread tries the lock of a connection again and again, as long as another thread sends under it:
    Pair::handleEvents of gloo/transport/tcp/pair.cc, as read in the library of torch 2.13.0.  Where ranks share
    cores, what is sent wakes its receiver, which takes the core from the sender within the lock: the sender's own
    gloo thread then tried for a fifth of the time that a run took of its processors.

    Source: sched(7), SCHED_BATCH.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def use_few_workers() -> None:
    """From now on this process makes every group of gloo with so few; nothing happens where torch has no gloo.

    torch.distributed passes a timeout on to gloo and no options, so that gloo's class is told here; groups
    that are made with options stay as they are asked for.
    """
    from torch import distributed as dist

    if not dist.is_gloo_available():
        return
    group: Any = dist.ProcessGroupGloo
    construct: Callable[..., None] = group.__init__

    def init(self: Any, store: Any, rank: int, size: int, *given: Any, **named: Any) -> None:
        timeout = named.get("timeout", given[0] if given else None if named else TIMEOUT)
        if isinstance(timeout, timedelta):
            given, named = (_options(group, timeout),), {}
        construct(self, store, rank, size, *given, **named)

    group.__init__ = init


def _options(group: Any, timeout: timedelta) -> Any:
    options = group._Options()
    options._devices, options._timeout, options._threads = _devices(group), timeout, WORKERS
    return options


def _devices(group: Any) -> list[Any]:
    """As torch chooses them: of the interfaces that are named, or the one of the machine's name."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interfaces:
        return [group.create_device(interface=name) for name in interfaces.split(",") if name]
    return [group.create_default_device()]
