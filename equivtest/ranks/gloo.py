"""Gives each gloo group one worker thread, because with two threads torch may free a string twice.

By default two threads of a group take collectives off its queue.  After each collective a thread assigns the
collective's name to a string that both threads share, without a lock (ProcessGroupGloo::runLoop, as read in the library
of torch 2.13.0).  libstdc++ keeps names of up to 15 characters within the string.  ALLGATHER_COALESCED, the name of a
functional all_gather, is longer and lies on the heap, where two threads at once free it twice.  Finding 39 has a
program without equivtest that crashes. The test `tests/ranks/test_gloo.py` fails once torch has mended this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

WORKERS = 1
"""Threads of each group that run collectives; torch starts two for each network interface (2.13.0)."""
TIMEOUT = timedelta(minutes=30)
"""Time-out that torch gives a gloo group by default."""


def let_senders_finish() -> None:
    """Makes Linux wake this process's threads without taking the core from a thread that runs.

    Gloo's own thread tries a connection's lock again and again while another thread sends under that lock:
    Pair::handleEvents of gloo/transport/tcp/pair.cc, as read in the library of torch 2.13.0.  If ranks share cores,
    each message wakes its receiver, which takes the core from the sender while the sender has the lock. Without this
    function, gloo threads that wait for such a lock used a fifth of a run's processor time.

    Source: sched(7), SCHED_BATCH.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def use_few_workers() -> None:
    """Makes every later gloo group of this process have WORKERS threads. Does nothing if torch has no gloo.

    torch.distributed passes gloo a timeout and no options, so this function wraps the constructor of gloo's class. If a
    group is made with options, the options stay unchanged.
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
    options._timeout, options._threads = timeout, WORKERS
    options._devices = list(_devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME", "")))
    return options


@cache
def _devices(process: int, interfaces: str) -> tuple[Any, ...]:
    """Returns the devices that all groups of this process share.

    torch makes a new device for each group (2.13.0). A device has a thread that wakes 96 times a second, even if no
    message arrives. When a run of the tests had 1,100 such threads, the kernel took 30 % of the processor time.
    """
    from torch import distributed as dist

    group: Any = dist.ProcessGroupGloo
    if interfaces:
        return tuple(group.create_device(interface=name) for name in interfaces.split(",") if name)
    return (group.create_default_device(),)
