"""The parent's side of the server and of the rank processes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from equivtest import limits
from equivtest.errors import BrokenSetup
from equivtest.ranks.channel import Channel, close_in_forks
from equivtest.ranks.messages import Ready, interpreter_command
from equivtest.ranks.poison import poison_environment
from equivtest.ranks.scratch import Scratch, sweep
from equivtest.ranks.server import CLOSE, ENDING, FORK, PID, kill_group
from equivtest.ranks.stacks import read_tail
from equivtest.ranks.surroundings import ONE_THREAD

_WAY_OUT = "use fewer ranks, free memory, or raise the limits on processes and open files (ulimit -u, -n)"


@dataclass(frozen=True)
class Ending:
    """How a rank's process ended, and when by time.monotonic(); no code where nobody saw it."""

    code: int | None
    at_s: float

    def __str__(self) -> str:
        if self.code is None:
            return "ended together with the server that forked it"
        if self.code >= 0:
            return f"exited with code {self.code}"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"killed by signal {-self.code}"


class RankProcess:
    """One rank as its parent sees it.

    Attributes:
        end: Descriptor that becomes readable when the process has ended.
    """

    def __init__(self, pid: int, channel: Channel, end: int) -> None:
        self.pid = pid
        self.channel = channel
        self.end = end
        self._ending: Ending | None = None

    def ending(self, now_s: float) -> Ending:
        """How the process ended; asked for once `end` is readable."""
        if self._ending is None:
            data = os.read(self.end, ENDING.size)
            self._ending = Ending(*ENDING.unpack(data)) if len(data) == ENDING.size else Ending(None, now_s)
        return self._ending

    def wait(self, limit_s: float) -> bool:
        """Whether the process ends within `limit_s`."""
        poll = select.poll()
        poll.register(self.end, select.POLLIN)
        return self._ending is not None or bool(poll.poll(max(limit_s, 0.0) * 1000))

    def kill(self) -> None:
        """Kills the process and what it forked."""
        kill_group(self.pid)

    def close(self) -> None:
        """Lets go of the descriptors; the process must have ended."""
        self.channel.close()
        os.close(self.end)


class Server:
    """The process that ranks are forked from.

    Starting returns at once; the first fork waits until the server is ready.

    Args:
        start: See `Backend`.
        imports: Modules that must be importable there.
        preload: Modules that are imported where they can be.
        environment: Added to the environment of the server and its ranks, for what is read
            only when a process begins.

    Attributes:
        ready: Its first word: how it starts ranks; None before the first rank.
    """

    def __init__(
        self, start: str, imports: tuple[str, ...], preload: tuple[str, ...], environment: Mapping[str, str]
    ) -> None:
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
                self._process = self._execute(theirs, start, imports, preload, environment)
        except OSError as error:
            self._control.close()
            self._scratch.remove()
            raise BrokenSetup(f"cannot start the server that forks ranks: {error}; {_WAY_OUT}") from error
        self.ready: Ready | None = None

    def _execute(
        self,
        theirs: socket.socket,
        start: str,
        imports: tuple[str, ...],
        preload: tuple[str, ...],
        environment: Mapping[str, str],
    ) -> subprocess.Popen[bytes]:
        surroundings = {**os.environ, **ONE_THREAD, **environment}
        arguments = (theirs.fileno(), os.getpid(), start, imports, preload)
        with (self._scratch.path / "output-server").open("wb") as output:
            return subprocess.Popen(
                interpreter_command(f"from equivtest.ranks.server import main; main(*{arguments!r})"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**surroundings, **poison_environment(surroundings)},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the parent, which then ends the ranks
            )

    @property
    def alive(self) -> bool:
        """Whether ranks can still be forked."""
        return self._process.poll() is None

    def fork_rank(self) -> RankProcess:
        """A new rank that waits for its `Start` message.

        Raises:
            BrokenSetup: the server does not come up, has died, or the system forks no more.
        """
        with contextlib.ExitStack() as if_it_fails:
            try:
                ours, theirs = socket.socketpair()
                if_it_fails.callback(ours.close)
                with theirs:
                    end_r, end_w = os.pipe()
                    if_it_fails.callback(os.close, end_r)
                    with open(end_w, "wb", buffering=0):
                        pid = self._request(theirs.fileno(), end_w)
            except OSError as error:
                raise BrokenSetup(f"cannot start a rank: {error}; {_WAY_OUT}") from error
            if_it_fails.pop_all()
        return RankProcess(pid, Channel(ours, limits.SEND_S), end_r)

    def _request(self, channel: int, end: int) -> int:
        """Has a rank forked; gives its process id."""
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
        """Ends the server and the ranks it still has; a second call does nothing."""
        with contextlib.suppress(OSError):  # it has ended by itself
            self._control.sendall(CLOSE)
        self._control.close()
        try:
            self._process.wait(limits.STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._scratch.remove()
