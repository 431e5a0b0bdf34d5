"""Measures how long the machine stood still, so that a delay is not blamed on a program.

On each core a process sleeps for short times.  If one wakes far too late, its core ran no process, or the kernel had
other work.  A process that competes for the core delays it only by milliseconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

NAP_S = 0.02
LEAST_S = 0.25  # a nap that lasts so much longer is a standstill; 4 busy processes for each core delay it by 0.05

_WATCH = """
import os, sys, threading, time

def watch(core, nap_s, least_s):
    os.sched_setaffinity(0, {core})
    before_s = time.monotonic()
    print(before_s, before_s, flush=True)  # this process watches from now on
    while True:
        time.sleep(nap_s)
        now_s = time.monotonic()
        if now_s - before_s > nap_s + least_s:
            print(before_s, now_s, flush=True)
        before_s = now_s

core, nap_s, least_s = sys.argv[1:]
threading.Thread(target=watch, args=(int(core), float(nap_s), float(least_s)), daemon=True).start()
sys.stdin.read()  # until the other end is closed, however its process ends
"""


class Standstills:
    """Times at which a core ran nothing, in one file for each watching process.

    Attributes:
        pids: Process ids of the watching processes.
    """

    def __init__(self, pids: list[int], paths: list[Path]) -> None:
        self.pids = pids
        self._paths = paths

    def seconds(self, begun_s: float, ended_s: float) -> float:
        """Returns how many seconds some core stood still between two readings of time.monotonic()."""
        time.sleep(2 * NAP_S)  # a watcher that has just woken needs time to write
        lines = [line.split() for path in self._paths for line in path.read_text().splitlines()]
        total_s, until_s = 0.0, begun_s
        for left_s, right_s in sorted((float(left), float(right)) for left, right in lines):
            left_s, right_s = max(left_s, until_s), min(right_s, ended_s)
            total_s += max(right_s - left_s, 0.0)
            until_s = max(until_s, right_s)
        return total_s


@contextmanager
def watching() -> Iterator[Standstills]:
    """Watches every core that this process may use, for as long as the block lasts and this process lives."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="standstill-")))
        watchers, paths = [], []
        for core in sorted(os.sched_getaffinity(0)):
            paths.append(folder / str(core))
            command = [sys.executable, "-c", _WATCH, str(core), str(NAP_S), str(LEAST_S)]
            notes = stack.enter_context(paths[-1].open("w"))
            watcher = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=notes))
            stack.callback(watcher.kill)
            watchers.append(watcher)
        for watcher, path in zip(watchers, paths, strict=True):
            while not path.stat().st_size and watcher.poll() is None:
                time.sleep(NAP_S)
        yield Standstills([watcher.pid for watcher in watchers], paths)
