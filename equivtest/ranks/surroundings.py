"""A rank's surroundings: the parent's environment, its own output, and ends that need no parent."""

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
from equivtest.ranks.channel import Channel
from equivtest.ranks.messages import Start

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment of ranks and of the server that forks them: no thread may live before the fork."""
_PR_SET_PDEATHSIG = 1  # of prctl(2)


def temporary_files_in(folder: Path) -> dict[bytes, bytes]:
    """Environment of ranks whose temporary files go into `folder`, but not torch's kernels: it keeps those for later.

    Source: default_cache_dir of torch/_inductor/runtime/cache_dir_utils.py (2.13.0).
    """
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    kernels = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{user}")
    return {b"TMPDIR": os.fsencode(folder), b"TORCHINDUCTOR_CACHE_DIR": os.fsencode(kernels)}


def enter(start: Start) -> None:
    """Takes over the parent's environment, import path and working directory; on another host the first is added."""
    if start.store is None:
        os.environb.clear()
        sys.path[:] = [os.fsdecode(entry) for entry in start.sys_path]
        os.chdir(start.directory)
    os.environb.update(start.environment)
    os.environ.update(ONE_THREAD)
    tempfile.tempdir = None  # what the server has found out is not of this environment
    importlib.invalidate_caches()  # the server may have looked at these directories long ago


class _BoundedFile(io.FileIO):
    """A file that starts again instead of growing beyond limits.OUTPUT_BYTES, and never refuses."""

    def write(self, data: Buffer, /) -> int:
        kept = memoryview(data).cast("B")
        size = len(kept)
        kept = kept[-limits.OUTPUT_BYTES :]
        try:
            if os.fstat(self.fileno()).st_size + len(kept) > limits.OUTPUT_BYTES:
                self.truncate(0)
            os.write(self.fileno(), kept)
        except OSError:  # a full disk: what a subject prints must not decide how it ends
            pass
        return size


class Output:
    """The file that takes what this process prints, of bounded size."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        self._fd = fd
        sys.stdout, sys.stderr = _text_of(1), _text_of(2)

    def clear(self) -> None:
        """Starts the file again, so that it speaks of the present request."""
        os.ftruncate(self._fd, 0)

    def bound(self) -> None:
        """Starts the file again where C code or a child has let it grow beyond limits.OUTPUT_BYTES."""
        if os.fstat(self._fd).st_size > limits.OUTPUT_BYTES:
            self.clear()


def bound(output: Path) -> None:
    """Has the output of another process start again where it has grown beyond twice limits.OUTPUT_BYTES."""
    with contextlib.suppress(FileNotFoundError):
        if output.stat().st_size > 2 * limits.OUTPUT_BYTES:
            os.truncate(output, 0)


def _text_of(fd: int) -> TextIO:
    binary = io.BufferedWriter(_BoundedFile(fd, "w", closefd=False))
    return io.TextIOWrapper(binary, errors="backslashreplace", line_buffering=True)


def die_with_parent(channel: Channel, output: Output) -> None:
    """Kills this process and what it forked as soon as the parent is gone, however it went."""
    os.setpgid(0, 0)
    threading.Thread(target=_watch, args=(channel.fileno(), output), name="equivtest-guard", daemon=True).start()


def end_with_starter() -> None:
    """Asks the kernel to kill this process when the one that started it ends, however that ends; Linux alone can.

    Source: prctl(2).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(fd: int, output: Output) -> None:
    """Waits for the hang-up alone, of one direction where it is TCP's: without POLLIN, poll leaves the messages be."""
    poll = select.poll()
    poll.register(fd, getattr(select, "POLLRDHUP", 0))
    while not poll.poll(limits.WATCH_S * 1000):
        output.bound()
    os.killpg(0, signal.SIGKILL)


def write_stacks_on_signal(path: Path) -> None:
    """Has SIGUSR1, and a crash, write the stacks of all threads to `path`, even inside C code."""
    file = path.open("a")  # kept open: the handler has nothing but its descriptor
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    faulthandler.enable(file=file, all_threads=True)
