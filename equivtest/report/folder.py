"""Reserves the folder of --report for one run, and removes the files of earlier runs from it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from equivtest.base.files import PART
from equivtest.errors import Misuse

FAILURES = "failures"
NAMES = frozenset(
    {
        "report.html", "junit.xml", "verdicts.jsonl", "cells.csv", "audit.csv", "summary.txt", "environment.json",
        "run.jsonl.gz",
    }
)  # fmt: skip
"""Names of files that equivtest writes and replaces.  All other files in the folder belong to the user and stay."""
_REPLAY = re.compile(r".+-[a-z_]+-[a-z_]+-[0-9a-f]{8}\.json")


class ReportFolder:
    """A folder for a report.

    No other run can write a report into the folder until `leave` is called or this process ends.

    The kernel locks the folder itself. So the lock needs no file, and a killed process leaves no lock behind.

    Raises:
        Misuse: another run writes into the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(path)

    def clear(self) -> None:
        """Removes the files of an earlier run, including junit.xml and replay files.  Raises Misuse if one stays."""
        for path in _left_in(self.path):
            try:
                path.unlink()
            except OSError as error:
                raise Misuse(f"--report: cannot replace {path}: {error.strerror or error}; remove it") from error
        with contextlib.suppress(OSError):  # it contains files of the user, or is missing
            (self.path / FAILURES).rmdir()

    def leave(self) -> None:
        """Lets other runs use the folder. A second call does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _left_in(folder: Path) -> Iterator[Path]:
    yield from (path for path in sorted(folder.iterdir()) if path.name in NAMES or PART.fullmatch(path.name))
    failures = folder / FAILURES
    if failures.is_dir():
        names = (_REPLAY, PART)
        yield from (path for path in sorted(failures.iterdir()) if any(name.fullmatch(path.name) for name in names))


def _lock(path: Path) -> int:
    """Opens and locks the folder, and returns its descriptor.  A file system without locks leaves it unlocked."""
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise Misuse(
            f"--report: another run writes to {path}{_owner(path)}: wait for its end, or name another folder"
        ) from None
    except OSError:  # network file systems lock no folder
        pass
    return lock


def _owner(path: Path) -> str:
    """Returns ' (process 17, started 2026-11-02T10:00:00Z)' for the run that writes to the folder, or '' if unknown."""
    try:
        data = json.loads((path / "environment.json").read_text(encoding="utf-8"))
        return f" (process {data['process']}, started {data['started']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
