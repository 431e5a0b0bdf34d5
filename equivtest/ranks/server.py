"""Runs the process from which all ranks of a parent are forked.

This module does not use multiprocessing's forkserver. That server imports your `__main__` again, swallows the
exceptions of preloaded modules, ignores the parent's import path (CPython 3.11) and is shared with your own processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import importlib
import os
import select
import selectors
import signal
import socket
import struct
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from equivtest.ranks.channel import Channel
from equivtest.ranks.failure import describe_exception
from equivtest.ranks.forks import why_forks_fail
from equivtest.ranks.messages import Ready, interpreter_command
from equivtest.ranks.scratch import sweep_after

FORK = b"f"
"""Byte that requests one rank; two descriptors come with it: the rank's channel, and the pipe for its exit code."""
CLOSE = b"c"
"""Byte by which the parent announces that it ends the server on purpose."""
IMPORT = b"i"
"""Byte that requests the import of modules. The size of their names follows, in bytes, then the names in lines."""
SIZE = struct.Struct("q")
PID = struct.Struct("q")
ENDING = struct.Struct("qd")
"""Format of a rank's end: its exit code, negative for a signal, and time.monotonic()."""
_WAY_OUT = "use start='spawn', which starts a new interpreter for each rank, or start='auto', which chooses what works"


def main(
    fd: int,
    parent: int,
    start: str,
    device: str,
    imports: Sequence[str],
    preload: Sequence[str],
    reason: str = "",
) -> None:
    """Runs the server, which forks ranks until the parent closes the connection.

    When the parent has closed the connection, the ranks and this process end.

    Args:
        fd: Stream socket to the parent.
        reason: The reason why ranks cannot be forked, if an earlier server process has found that they cannot.
            Otherwise ''.
    """
    os.set_inheritable(fd, False)  # noqa: FBT003
    control = socket.socket(fileno=fd)
    _watch_parent(control, parent)
    ready = Ready(start, reason) if start == "spawn" else _prepare(start, device, imports, preload)
    _stop_watching(control)
    if (start, ready.start) == ("auto", "spawn"):
        _execute_again(fd, parent, (device, imports, preload), ready.reason)
    try:
        Channel(control.dup()).send(msgspec.msgpack.encode(ready))
        on_purpose = bool(ready.problem) or _Server(control, ready.start).serve()
    except OSError:  # the parent is gone
        on_purpose = False
    _leave(parent, on_purpose=on_purpose)


def _execute_again(fd: int, parent: int, prepared: tuple[object, ...], reason: str) -> NoReturn:
    """Replaces this process by a server without torch's threads and memory, which starts new interpreters as ranks."""
    os.set_inheritable(fd, True)  # noqa: FBT003
    arguments = (fd, parent, "spawn", *prepared, reason)
    command = interpreter_command(f"from equivtest.ranks.server import main; main(*{arguments!r})")
    os.execv(command[0], command)


def _leave(parent: int, *, on_purpose: bool) -> NoReturn:
    if not on_purpose:
        sweep_after(parent)
    os._exit(0)  # an orderly exit of torch would take the parent 0.2 s


def _watch_parent(control: socket.socket, parent: int) -> None:
    """Ends this process as soon as the parent ends, even while this process is busy importing.

    The function uses a signal, since this process must have no thread when the first rank is forked.
    """

    def end_without_parent(*_: object) -> None:
        poll = select.poll()
        poll.register(control, 0)
        if poll.poll(0):
            _leave(parent, on_purpose=False)

    signal.signal(signal.SIGIO, end_without_parent)
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETFL, fcntl.fcntl(control, fcntl.F_GETFL) | os.O_ASYNC)
    end_without_parent()  # it may have ended before


def _stop_watching(control: socket.socket) -> None:
    fcntl.fcntl(control, fcntl.F_SETFL, fcntl.fcntl(control, fcntl.F_GETFL) & ~os.O_ASYNC)
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # not the default, which ends the process


def _prepare(start: str, device: str, imports: Sequence[str], preload: Sequence[str]) -> Ready:
    """Imports the modules for ranks, tests if forks can run a backward, and returns how ranks will be started."""
    gc.disable()  # no module is garbage yet, and looking for garbage takes an eighth of the start
    try:
        for module in imports:
            importlib.import_module(module)
    except Exception as error:  # a vendor's module may raise anything
        return Ready(start, problem=f"the ranks' imports fail:\n{describe_exception(error)[2]}")
    for module in ("equivtest.ranks.rank", *preload):
        _try_import(module)
    try:
        from equivtest.ranks.warm import warm

        warm(device)
    except Exception:  # ranks then start slowly, or report the fault themselves
        traceback.print_exc()
    gc.enable()
    reason = why_forks_fail(device)
    if reason and start == "forkserver":
        return Ready(start, problem=f"ranks cannot be forked: a fork runs no backward ({reason}); {_WAY_OUT}")
    return Ready("spawn" if reason else "forkserver", reason)


def _try_import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception:  # the rank that needs the module will report it
        traceback.print_exc()


class _Server:
    def __init__(self, control: socket.socket, start: str) -> None:
        self._control = control
        self._start = start
        self._ends: dict[int, int] = {}  # pid -> pipe for its exit code

    def serve(self) -> bool:
        """Forks ranks and reports their ends until the parent is gone. Returns True if the parent has sent CLOSE."""
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(wake_r, selectors.EVENT_READ)
        command = FORK
        while command in (FORK, IMPORT):
            ready = {key.fd for key, _ in selector.select()}
            if wake_r in ready:
                os.read(wake_r, 2**16)
                self._bury()
            if self._control.fileno() in ready:
                command, fds = self._receive()
                if command == IMPORT:
                    self._import()
                elif command == FORK and len(fds) < 2:  # no descriptor is free here
                    self._refuse(fds)
                elif command == FORK:
                    self._fork(fds, (wake_r, wake_w, selector.fileno()))
        self._kill_all()
        return command == CLOSE

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            command, fds, _, _ = socket.recv_fds(self._control, 1, 2)
        except ConnectionResetError:
            return b"", []
        for fd in fds:
            os.set_inheritable(fd, False)  # noqa: FBT003
        return command, fds

    def _import(self) -> None:
        size = SIZE.unpack(self._control.recv(SIZE.size, socket.MSG_WAITALL))[0]
        for module in self._control.recv(size, socket.MSG_WAITALL).decode().split("\n"):
            _try_import(module)
        gc.freeze()  # as in `warm`

    def _fork(self, fds: list[int], own: tuple[int, ...]) -> None:
        channel, end = fds
        try:
            pid = os.fork()
        except OSError as error:  # no memory or no process left: reported to the parent
            pid = -(error.errno or 1)
        if pid == 0:
            self._become_rank(channel, (end, *own, *self._ends.values(), self._control.fileno()))
        os.close(channel)
        if pid > 0:
            self._ends[pid] = end
        else:
            os.close(end)
        self._control.sendall(PID.pack(pid))

    def _refuse(self, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        self._control.sendall(PID.pack(-errno.EMFILE))

    def _become_rank(self, channel: int, others: tuple[int, ...]) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        try:
            if self._start == "spawn":
                os.set_inheritable(channel, True)  # noqa: FBT003
                command = interpreter_command(f"from equivtest.ranks.rank import main; main({channel})")
                os.execv(command[0], command)
            for fd in others:
                os.close(fd)
            from equivtest.ranks.rank import main as rank_main

            rank_main(channel)
        finally:
            traceback.print_exc()
            os._exit(1)

    def _bury(self) -> None:
        while self._ends:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (end := self._ends.pop(pid, None)) is not None:
                _report(end, os.waitstatus_to_exitcode(status))

    def _kill_all(self) -> None:
        for pid in self._ends:
            kill_group(pid)
        for pid in self._ends:
            os.waitpid(pid, 0)


def _report(end: int, code: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the parent no longer cares
        os.write(end, ENDING.pack(code, time.monotonic()))
    os.close(end)


def kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # it leads a group only after its own setpgid
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
