"""Starts the server process that forks ranks on this machine, and controls it from the parent."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from equivtest.base import limits
from equivtest.errors import BrokenSetup
from equivtest.ranks.backend import Backend
from equivtest.ranks.channel import Channel, close_in_forks
from equivtest.ranks.messages import Ready, interpreter_command
from equivtest.ranks.poison import poison_environment
from equivtest.ranks.process import Forked, Place, RankProcess
from equivtest.ranks.scratch import Scratch, sweep
from equivtest.ranks.server import CLOSE, FORK, IMPORT, PID, SIZE
from equivtest.ranks.stacks import read_tail, take_stacks
from equivtest.ranks.surroundings import ONE_THREAD, temporary_files_in

VISIT = "equivtest.ranks.visit:visit"
"""Default of the function that a rank calls for each case, see `World`."""
USERS = ("equivtest.programs.run.module", "equivtest.programs.values")
"""Modules that every rank of a user's program needs.

The server imports them once, because each test file of a user has its own ranks.
"""

_WAY_OUT = "use fewer ranks, free memory, or raise the limits on processes and open files (ulimit -u, -n)"


def preloads(visit: str = VISIT) -> tuple[str, ...]:
    return visit.partition(":")[0], *USERS


class Server:
    """Controls the process that forks the ranks of this machine.

    The constructor returns at once. The first fork waits until the process is ready.

    Args:
        backend: Backend of the ranks, with the modules that the process must be able to import.
        preload: Modules that the process imports if it can.
        environment: Variables added for the process and its ranks, for settings that a process reads only at its start.

    Attributes:
        ready: First message of the process, which has the way in which ranks are started. None before the first rank.
    """

    is_local = True

    def __init__(self, backend: Backend, preload: tuple[str, ...], environment: Mapping[str, str]) -> None:
        sweep()
        self._scratch = Scratch()
        try:
            self._control, theirs = socket.socketpair()
        except OSError as error:
            self._scratch.remove()
            raise BrokenSetup(f"cannot start the server that forks ranks: {error}; {_WAY_OUT}") from error
        close_in_forks(self._control)
        try:
            with theirs:
                self._process = self._execute(theirs, backend, preload, environment)
        except OSError as error:
            self._control.close()
            self._scratch.remove()
            raise BrokenSetup(f"cannot start the server that forks ranks: {error}; {_WAY_OUT}") from error
        self.ready: Ready | None = None
        self._preloaded: set[str] = set()

    def _execute(
        self,
        theirs: socket.socket,
        backend: Backend,
        preload: tuple[str, ...],
        environment: Mapping[str, str],
    ) -> subprocess.Popen[bytes]:
        surroundings = {**os.environ, **ONE_THREAD, **environment}
        arguments = (theirs.fileno(), os.getpid(), backend.start, backend.device, backend.imports, preload)
        environment = {**surroundings, **poison_environment(surroundings)}
        code = f"from equivtest.ranks.server import main; main(*{arguments!r})"
        return execute(code, self._scratch.path / "output-server", environment, (theirs.fileno(),))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork_ranks(self, world_size: int, scratch: Sequence[Path]) -> Iterator[RankProcess]:
        """Forks the ranks of a world one after the other and yields them. Each rank waits for its `Start` message.

        Raises:
            BrokenSetup: the server does not start or has died, or the system cannot fork.
        """
        own, temporary = scratch
        surroundings = {**os.environb, **temporary_files_in(temporary)}
        for rank in range(world_size):
            with contextlib.ExitStack() as if_it_fails:
                try:
                    ours, theirs = socket.socketpair()
                    if_it_fails.callback(ours.close)
                    with theirs:
                        forked = self.fork(theirs)
                except OSError as error:
                    raise BrokenSetup(f"cannot start a rank: {error}; {_WAY_OUT}") from error
                if_it_fails.pop_all()
            yield RankProcess(
                forked.pid, Channel(ours, limits.SEND_S), forked.end, rank, Place(own, surroundings, rank)
            )

    def preload(self, modules: Collection[str]) -> None:
        new = sorted(set(modules) - self._preloaded)
        if new and self.ready is not None and self.ready.start == "forkserver":
            self._preloaded.update(new)
            names = "\n".join(new).encode()
            with contextlib.suppress(OSError):  # the server has died, which the next fork reports
                self._control.sendall(IMPORT + SIZE.pack(len(names)) + names)

    def fork(self, channel: socket.socket) -> Forked:
        """Forks a rank that talks to its parent over `channel`. The caller must still close its own copy of `channel`.

        Raises:
            BrokenSetup: the server does not start or has died, or the system cannot fork.
            OSError: this process has no free descriptor.
        """
        with contextlib.ExitStack() as if_it_fails:
            end_r, end_w = os.pipe()
            if_it_fails.callback(os.close, end_r)
            with open(end_w, "wb", buffering=0):
                pid = self._request(channel.fileno(), end_w)
            if_it_fails.pop_all()
        return Forked(pid, end_r)

    def take_stacks(self, ranks: Mapping[int, RankProcess]) -> dict[int, str]:
        return take_stacks({rank: (process.pid, process.stacks) for rank, process in ranks.items()})

    def await_certainty(self, ranks: Sequence[RankProcess]) -> None:
        """Does nothing, because the host of these ranks is this machine, which cannot be cut off."""

    def _request(self, channel: int, end: int) -> int:
        self._control.settimeout(limits.START_S)
        try:
            self._wait_until_ready()
            socket.send_fds(self._control, [FORK], [channel, end])
            answer = self._control.recv(PID.size, socket.MSG_WAITALL)
            if len(answer) < PID.size:
                raise EOFError("it has ended")
        except (OSError, EOFError) as error:
            raise BrokenSetup(self._broken(f"{type(error).__name__}: {error}")) from error
        pid: int = PID.unpack(answer)[0]
        if pid < 0:
            raise BrokenSetup(f"cannot fork a rank: {os.strerror(-pid)}; {_WAY_OUT}")
        return pid

    def _wait_until_ready(self) -> None:
        if self.ready is None:
            channel = Channel(self._control.dup())
            try:
                ready = msgspec.msgpack.decode(channel.receive(limits.START_S), type=Ready)
            finally:
                channel.close()
            if ready.problem:
                raise BrokenSetup(ready.problem)
            self.ready = ready

    def _broken(self, reason: str) -> str:
        output = read_tail(self._scratch.path / "output-server")
        return f"the server that forks ranks does not answer ({reason}); its output:\n{output}"

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it has already ended
            self._control.sendall(CLOSE)
        self._control.close()
        try:
            self._process.wait(limits.STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._scratch.remove()


def execute(
    code: str, output: Path, environment: Mapping[str, str], passed: tuple[int, ...]
) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen(
            interpreter_command(code),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            pass_fds=passed,
            start_new_session=True,  # Ctrl-C is for its parent, which then ends the ranks
        )
