"""Sets up the environment and the output file of a rank's process, and makes the process end with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import getpass
import importlib
import io
import os
import select
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from equivtest.base import limits
from equivtest.base.functions import be_rank
from equivtest.ranks.channel import Channel
from equivtest.ranks.messages import Start

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment variables of ranks and of the server that forks them: no thread may exist before the fork."""
_PR_SET_PDEATHSIG = 1  # of prctl(2)


def temporary_files_in(folder: Path) -> dict[bytes, bytes]:
    """Returns environment variables that put temporary files into `folder`.

    Compiled kernels, which torch keeps for later runs, stay in torch's own directory. Source: default_cache_dir of
    torch/_inductor/runtime/cache_dir_utils.py (2.13.0).
    """
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    kernels = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{user}")
    return {b"TMPDIR": os.fsencode(folder), b"TORCHINDUCTOR_CACHE_DIR": os.fsencode(kernels)}


def enter(start: Start) -> None:
    """Gives this rank the parent's environment, import path and directory.

    On another host than the parent's, the function only adds environment variables.
    """
    be_rank()
    if start.store is None:
        os.environb.clear()
        sys.path[:] = [os.fsdecode(entry) for entry in start.sys_path]
        os.chdir(start.directory)
    os.environb.update(start.environment)
    os.environ.update(ONE_THREAD)
    tempfile.tempdir = None  # the server's value belongs to another environment
    importlib.invalidate_caches()  # the server may have looked at these directories long ago


class _BoundedFile(io.FileIO):
    """A file that is emptied when it would exceed limits.OUTPUT_BYTES, and whose writes never fail."""

    def write(self, data: Buffer, /) -> int:
        kept = memoryview(data).cast("B")
        size = len(kept)
        kept = kept[-limits.OUTPUT_BYTES :]
        try:
            if os.fstat(self.fileno()).st_size + len(kept) > limits.OUTPUT_BYTES:
                self.truncate(0)
            os.write(self.fileno(), kept)
        except OSError:  # a full disk: printing must not decide how a subject ends
            pass
        return size


class Output:
    """The file to which this process writes stdout and stderr, with a bounded size."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        self._fd = fd
        sys.stdout, sys.stderr = _text_of(1), _text_of(2)

    def clear(self) -> None:
        os.ftruncate(self._fd, 0)

    def bound(self) -> None:
        """Empties the file if C code or a child has made it larger than limits.OUTPUT_BYTES."""
        if os.fstat(self._fd).st_size > limits.OUTPUT_BYTES:
            self.clear()


def bound(output: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if output.stat().st_size > 2 * limits.OUTPUT_BYTES:
            os.truncate(output, 0)


def _text_of(fd: int) -> TextIO:
    binary = io.BufferedWriter(_BoundedFile(fd, "w", closefd=False))
    return io.TextIOWrapper(binary, errors="backslashreplace", line_buffering=True)


def die_with_parent(channel: Channel, output: Output) -> None:
    """Starts a thread that kills this process and its children as soon as the parent is gone, for any reason."""
    os.setpgid(0, 0)
    threading.Thread(target=_watch, args=(channel.fileno(), output), name="equivtest-guard", daemon=True).start()


def end_with_starter() -> None:
    """Asks the kernel to kill this process when its starter ends, for any reason. This works only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(fd: int, output: Output) -> None:
    """Bounds the output until the parent closes the connection, then kills this process's group.

    poll reports that the parent closed the connection. On TCP it reports this even if the parent closed only its own
    direction. poll ignores messages, because POLLIN is not requested.
    """
    poll = select.poll()
    poll.register(fd, getattr(select, "POLLRDHUP", 0))
    while not poll.poll(limits.WATCH_S * 1000):
        output.bound()
    os.killpg(0, signal.SIGKILL)


def write_stacks_on_signal(path: Path) -> None:
    """Writes the stacks of all threads to `path` at SIGUSR1 and at a crash, even inside C code."""
    file = path.open("a")  # stays open: the handler keeps only its descriptor
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    faulthandler.enable(file=file, all_threads=True)
