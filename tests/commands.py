"""The `equivtest` command in this process, on ranks of this process's server.

A separate process takes six CPU seconds more: it imports torch, and its server imports it again.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from equivtest import cli
from equivtest.ranks.pool import Pool


@dataclass(frozen=True)
class Ended:
    """Exit code and what was printed."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Command:
    """Calls `equivtest ARGS` as a shell in `folder` would.

    Attributes:
        pool: Its server forks the ranks.
    """

    pool: Pool
    capsys: pytest.CaptureFixture[str]

    def __call__(self, folder: Path, *args: str) -> Ended:
        """Runs the command and returns its outcome; the caller's process does not change."""
        self.capsys.readouterr()
        with as_in(folder), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["equivtest", *args])
            patch.setattr("equivtest.ranks.pool.Pool", functools.partial(Pool, beside=self.pool))
            with pytest.raises(SystemExit) as end:
                cli.main()
        printed = self.capsys.readouterr()
        return Ended(int(end.value.code or 0), printed.out, printed.err)


@contextmanager
def as_in(folder: Path) -> Iterator[None]:
    """Working directory, import path and filters of warnings of a new process; modules of the folder go with it."""
    before, directory, path = set(sys.modules), os.getcwd(), list(sys.path)
    os.chdir(folder)
    sys.path.append(str(folder))
    try:
        with warnings.catch_warnings():
            warnings.resetwarnings()
            yield
    finally:
        os.chdir(directory)
        sys.path[:] = path
        for name in set(sys.modules) - before:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(f"{folder}{os.sep}"):
                del sys.modules[name]
