"""Creates and removes scratch directories.

Each world has one directory for the harness's files and one for temporary files.

The directory for the harness's files is in memory if /dev/shm has room.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from equivtest.base import limits
from equivtest.errors import BrokenSetup

_NAME = re.compile(r"equivtest-(\d+)-\w+")
_MEMORY = Path("/dev/shm")


def scratch_roots() -> list[Path]:
    usable = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK | os.X_OK)
    usable = usable and shutil.disk_usage(_MEMORY).free >= limits.SCRATCH_BYTES
    return [_MEMORY] * usable + [Path(tempfile.gettempdir())]


def temporary_roots() -> list[Path]:
    """Returns directories for files of a subject. /dev/shm comes last, because the files may exceed the memory."""
    return list(dict.fromkeys([Path(tempfile.gettempdir()), *scratch_roots()]))


def scratch_directories() -> list[Path]:
    """Returns every scratch directory on this machine, of any process, even if /dev/shm has no room now."""
    roots = dict.fromkeys([_MEMORY, Path(tempfile.gettempdir())])
    return [path for root in roots for path in root.glob("equivtest-*") if _NAME.fullmatch(path.name)]


class Scratch:
    """A new directory of this process. A locked file shows other processes that the directory is in use.

    Args:
        roots: Allowed parent directories, the best first. The default is the result of `scratch_roots`.

    Raises:
        BrokenSetup: no root has room.
    """

    def __init__(self, roots: Sequence[Path] = ()) -> None:
        self.path, self._lock = _make_directory(roots or scratch_roots())
        self._removal: threading.Thread | None = None

    def remove(self) -> None:
        """Removes the directory, or waits until `remove_aside` has removed it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            _remove(self.path)
        if self._removal is not None:
            self._removal.join()
            self._removal = None

    def remove_aside(self) -> None:
        """Removes the directory in a thread, without waiting for the thread, because a disk may hang for seconds."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            removal = threading.Thread(target=_remove, args=(self.path,), name="removes a scratch directory")
            try:
                removal.start()
            except RuntimeError:  # the system has no room for another thread
                _remove(self.path)
            else:
                self._removal = removal


def _make_directory(roots: Sequence[Path]) -> tuple[Path, int]:
    problems = []
    for root in roots:
        path = None
        try:
            path = Path(tempfile.mkdtemp(prefix=f"equivtest-{os.getpid()}-", dir=root))
            lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            try:
                _claim(lock)
            except OSError:
                os.close(lock)
                raise
        except OSError as error:
            problems.append(f"{root}: {error.strerror}")
            if path is not None:
                with contextlib.suppress(OSError):
                    os.unlink(path / "lock")
                with contextlib.suppress(OSError):  # not by listing it: no descriptor may be free
                    os.rmdir(path)
        else:
            return path, lock
    raise BrokenSetup(
        f"no room for a scratch directory ({'; '.join(problems)}); "
        "free some, raise the limit on open files (ulimit -n), or set TMPDIR to a directory with room"
    )


def _remove(path: Path) -> None:
    """Removes a directory. If the directory contains only files, one free descriptor is enough."""
    try:
        for name in os.listdir(path):
            os.unlink(path / name)
        os.rmdir(path)
    except OSError:  # a subject made a directory in it, or another process removes it too
        shutil.rmtree(path, ignore_errors=True)


def _claim(lock: int) -> None:
    """Locks the file, and writes to the file once to check that the directory has room for more files."""
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(lock, bytes(limits.RENDEZVOUS_BYTES))
    os.ftruncate(lock, 0)


def sweep() -> None:
    """Removes the scratch directories of processes that have ended.

    If a directory's file is locked, the directory is never removed, because its process may run in a container with
    other process ids.
    """
    for path in scratch_directories():
        if not is_alive(_owner_of(path)) and _is_unlocked(path):
            _remove(path)


def sweep_after(owner: int) -> None:
    """Removes the scratch directories of process `owner`, which ends or has ended, unless a process still locks them.

    The owner may still live, because it may have closed only one of several connections.  The kernel releases the locks
    of a process that ends one by one, so this function looks for unlocked directories until limits.UNLOCK_S has passed.
    A directory is removed only if it is unlocked twice in a row, because a new directory is unlocked for a moment
    before its owner locks it.
    """
    left = {path for path in scratch_directories() if _owner_of(path) == owner}
    unlocked: set[Path] = set()
    until_s = time.monotonic() + limits.UNLOCK_S
    while left and time.monotonic() < until_s:
        before, unlocked = unlocked, {path for path in left if _is_unlocked(path)}
        for path in before & unlocked:
            _remove(path)
            left.remove(path)
        time.sleep(limits.UNLOCK_S / 100)


def _owner_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _is_unlocked(path: Path) -> bool:
    try:
        lock = os.open(path / "lock", os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # another user's: not ours to judge
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
