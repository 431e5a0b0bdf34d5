"""Remains of a run: processes, files, shared memory.

A variable in its environment marks a run, and every program that it executes or forks
inherits the variable.  The run also has its own directory for temporary files.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MARKER = "EQUIVTEST_MARKED_RUN"
SHARED_MEMORY = Path("/dev/shm")
_SCRATCH = re.compile(r"equivtest-(\d+)-")
_PROCESS_ID = re.compile(r"(?<![0-9A-Za-z])\d{3,9}(?![0-9A-Za-z])")
_KEPT = ("pytest-of-", "torchinductor_")  # one of each for a user, shared by all runs, as their makers want it
_STEP_S = 0.1  # a look reads the environment of every process


@dataclass
class Marked:
    """A run that is distinguishable from everything else on the machine.

    Attributes:
        token: Unique value of the marker.
        temporary: Its directory for temporary files.
        family: Ids of its processes, as far as they were seen.
    """

    token: str
    temporary: Path
    family: set[int] = field(default_factory=set)
    _shared_before: frozenset[str] = field(default_factory=lambda: frozenset(_names(SHARED_MEMORY)))

    @property
    def environment(self) -> dict[str, str]:
        """For the run's first process."""
        return {MARKER: self.token, "TMPDIR": str(self.temporary)}

    def processes(self) -> list[psutil.Process]:
        """Its processes that still run; one that waits to be buried does not."""
        found = [process for process in psutil.process_iter() if self._is_mine(process)]
        self.family |= {process.pid for process in found}
        return found

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            own = f"{MARKER}={self.token}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            return own and process.status() != psutil.STATUS_ZOMBIE
        except (OSError, psutil.Error):
            return False  # it has ended, or is another user's

    def files(self) -> list[str]:
        """Lists files in its directory, without those that pytest and torch keep for later, and in shared memory."""
        kept = [self.temporary / name for name in _names(self.temporary) if not name.startswith(_KEPT)]
        shared = [SHARED_MEMORY / name for name in _names(SHARED_MEMORY) if self._may_be_mine(name)]
        return [str(path) for path in kept + shared]

    def _may_be_mine(self, name: str) -> bool:
        """True for a scratch directory with its owner's id, and other new files without a living stranger's id."""
        if name in self._shared_before:
            return False
        scratch = _SCRATCH.match(name)
        if scratch is not None:
            return int(scratch[1]) in self.family
        named = {int(number) for number in _PROCESS_ID.findall(name)}
        return not any(psutil.pid_exists(pid) for pid in named - self.family)

    def left(self) -> list[str]:
        """Everything of the run that is still there, a line each."""
        return [_describe(process) for process in self.processes()] + self.files()

    def left_of(self, members: set[int]) -> list[str]:
        """Lists remains of some of its processes: the processes themselves, and their scratch directories."""
        running = [_describe(process) for process in self.processes() if process.pid in members]
        scratch = [name for name in _names(SHARED_MEMORY) if (own := _SCRATCH.match(name)) and int(own[1]) in members]
        return running + [str(SHARED_MEMORY / name) for name in scratch]


def wait_until_nothing(look: Callable[[], list[str]], limit_s: float) -> tuple[float, list[str]]:
    """Seconds until `look` finds nothing, and what it still found at the limit."""
    begun_s = time.monotonic()
    while (left := look()) and time.monotonic() - begun_s < limit_s:
        time.sleep(_STEP_S)
    return time.monotonic() - begun_s, left


def marked_run(folder: Path) -> Marked:
    """A new run whose temporary files go into a directory below `folder`."""
    temporary = Path(tempfile.mkdtemp(prefix="temporary-", dir=folder))
    return Marked(str(temporary), temporary)


def _names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory)) if directory.is_dir() else []


def _describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid} of session {os.getsid(process.pid)}: {' '.join(process.cmdline())[-60:]}"
    except (OSError, psutil.Error):
        return f"process {process.pid}"
