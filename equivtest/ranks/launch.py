"""The parent's side of the server and of the rank processes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from equivtest import limits
from equivtest.errors import BrokenSetup
from equivtest.ranks.channel import Channel, close_in_forks
from equivtest.ranks.messages import Ready, interpreter_command
from equivtest.ranks.poison import poison_environment
from equivtest.ranks.scratch import Scratch, sweep
from equivtest.ranks.server import CLOSE, ENDING, FORK, PID, kill_group
from equivtest.ranks.stacks import output_file, read_tail, stacks_file, take_stacks
from equivtest.ranks.surroundings import ONE_THREAD, bound, temporary_files_in

_WAY_OUT = "use fewer ranks, free memory, or raise the limits on processes and open files (ulimit -u, -n)"


@dataclass(frozen=True)
class Ending:
    """How a rank's process ended, and when by time.monotonic(); no code where nobody saw it.

    Attributes:
        cut_off: Why nobody can see it: what became of its host.
    """

    code: int | None
    at_s: float
    cut_off: str = ""

    @property
    def is_certain(self) -> bool:
        """Whether the rank can answer nothing more: else only its connection tells."""
        return self.code is not None or bool(self.cut_off)

    def __str__(self) -> str:
        if self.cut_off:
            return self.cut_off
        if self.code is None:
            return "ended together with the server that forked it"
        if self.code >= 0:
            return f"exited with code {self.code}"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"killed by signal {-self.code}"


class Forked:
    """A process that a server has forked on this machine.

    Attributes:
        end: Descriptor that becomes readable when the process has ended.
    """

    def __init__(self, pid: int, end: int) -> None:
        self.pid = pid
        self.end = end
        self._ending: Ending | None = None

    def ending(self, now_s: float) -> Ending:
        """How the process ended; asked for once `end` is readable."""
        if self._ending is None:
            self._ending = self._read_ending(now_s)
        return self._ending

    def _read_ending(self, now_s: float) -> Ending:
        data = os.read(self.end, ENDING.size)
        return Ending(*ENDING.unpack(data)) if len(data) == ENDING.size else Ending(None, now_s)

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
        os.close(self.end)


@dataclass(frozen=True)
class Place:
    """Where a rank lives, and what it is told of that.

    Attributes:
        scratch: Directory for its own files.
        environment: What it finds there; of another host only what is added.
        local_rank: Its number among the world's ranks on its host.
        store: See `Start`.
        where: Its process and host, in words; '' on this machine.
    """

    scratch: Path
    environment: Mapping[bytes, bytes]
    local_rank: int
    store: tuple[str, int] | None = None
    where: str = ""


class RankProcess(Forked):
    """One rank as its parent sees it."""

    def __init__(self, pid: int, channel: Channel, end: int, rank: int, place: Place) -> None:
        super().__init__(pid, end)
        self.channel = channel
        self.place = place
        self.output, self.stacks = output_file(place.scratch, rank), stacks_file(place.scratch, rank)

    def close(self) -> None:
        self.channel.close()
        super().close()

    def to_parents_clock(self, at_s: float) -> float:
        """time.monotonic() of the rank's machine as that of this one."""
        return at_s

    def bound_output(self) -> None:
        """Has the output of a talkative rank start again: a rank in C code cannot see to it itself."""
        bound(self.output)

    def last_words(self) -> tuple[str, str]:
        """The ends of its output and of its stacks, once it has ended."""
        return read_tail(self.output), read_tail(self.stacks)


class Launcher(Protocol):
    """What ranks come from.

    Attributes:
        ready: How it starts ranks; None before the first.
        is_local: Whether they live on this machine, and share its files.
    """

    ready: Ready | None
    is_local: bool

    @property
    def alive(self) -> bool:
        """Whether ranks can still be had."""

    def fork_ranks(self, world_size: int, scratch: Sequence[Path]) -> Iterator[RankProcess]:
        """The ranks of a new world, each of which waits for its `Start` message.

        Args:
            scratch: Two directories of the world, for the harness's files and for temporary ones, where `is_local`.

        Raises:
            BrokenSetup: a rank cannot be had; `HostLost` where its host was lost meanwhile.
            Misuse: there are not so many.
        """

    def take_stacks(self, ranks: Mapping[int, RankProcess]) -> dict[int, str]:
        """The Python stacks of running ranks, by rank."""

    def await_certainty(self, ranks: Sequence[RankProcess]) -> None:
        """Returns when it is known of each rank's host whether it is still there."""

    def close(self) -> None:
        """Ends the ranks that are left; a second call does nothing."""


class Server:
    """The process that ranks of this machine are forked from.

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

    is_local = True

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

    def fork_ranks(self, world_size: int, scratch: Sequence[Path]) -> Iterator[RankProcess]:
        """As `Launcher` has it, one after the other.

        Raises:
            BrokenSetup: the server does not come up, has died, or the system forks no more.
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

    def fork(self, channel: socket.socket) -> Forked:
        """A new rank at the other end of `channel`, which stays the caller's to close.

        Raises:
            BrokenSetup: as of `fork_ranks`.
            OSError: no descriptor is free here.
        """
        with contextlib.ExitStack() as if_it_fails:
            end_r, end_w = os.pipe()
            if_it_fails.callback(os.close, end_r)
            with open(end_w, "wb", buffering=0):
                pid = self._request(channel.fileno(), end_w)
            if_it_fails.pop_all()
        return Forked(pid, end_r)

    def take_stacks(self, ranks: Mapping[int, RankProcess]) -> dict[int, str]:
        """The Python stacks of running ranks, by rank."""
        return take_stacks({rank: (process.pid, process.stacks) for rank, process in ranks.items()})

    def await_certainty(self, ranks: Sequence[RankProcess]) -> None:
        """Returns at once: this machine is there."""

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
