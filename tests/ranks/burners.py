"""Processes that keep cores busy, to see what a slow machine makes of a run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_BURN = """
import sys, threading

def burn():
    while True:
        pass

threading.Thread(target=burn, daemon=True).start()
sys.stdin.read()  # until the other end is closed, however its process ends
"""


@contextmanager
def burning(num_burners: int) -> Iterator[list[int]]:
    """So many busy processes, given by id, for as long as the block lasts and this process lives."""
    with ExitStack() as stack:
        burners = []
        for _ in range(num_burners):
            burner = stack.enter_context(subprocess.Popen([sys.executable, "-c", _BURN], stdin=subprocess.PIPE))
            stack.callback(burner.kill)
            burners.append(burner.pid)
        yield burners
