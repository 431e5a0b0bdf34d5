"""Represents a rank's process in its parent, and defines the interface of launchers, which start ranks."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from equivtest.ranks.channel import Channel
from equivtest.ranks.messages import Ready
from equivtest.ranks.server import ENDING, kill_group
from equivtest.ranks.stacks import output_file, read_tail, stacks_file
from equivtest.ranks.surroundings import bound


@dataclass(frozen=True)
class Ending:
    """Describes how and when a rank's process ended.

    Attributes:
        code: Exit code, which is negative for a signal. None if no process saw the exit.
        at_s: Time of the end, as time.monotonic() gives it.
        cut_off: What happened to the rank's host, if the host was lost. Otherwise ''.
    """

    code: int | None
    at_s: float
    cut_off: str = ""

    @property
    def is_certain(self) -> bool:
        """True if the rank certainly cannot answer any more. False if only its closed connection suggests that."""
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
        """Returns how the process ended. Call this method once `end` is readable."""
        if self._ending is None:
            self._ending = self._read_ending(now_s)
        return self._ending

    def _read_ending(self, now_s: float) -> Ending:
        data = os.read(self.end, ENDING.size)
        return Ending(*ENDING.unpack(data)) if len(data) == ENDING.size else Ending(None, now_s)

    def wait(self, limit_s: float) -> bool:
        """Waits for the process to end. The result is False if the process still runs after `limit_s`."""
        poll = select.poll()
        poll.register(self.end, select.POLLIN)
        return self._ending is not None or bool(poll.poll(max(limit_s, 0.0) * 1000))

    def kill(self) -> None:
        kill_group(self.pid)

    def close(self) -> None:
        """Closes the descriptors. The process must have ended."""
        os.close(self.end)


@dataclass(frozen=True)
class Place:
    """Settings that depend on the host of a rank.

    Attributes:
        scratch: Directory for the rank's own files.
        environment: Environment of the rank. On another host, this is only the variables to add.
        local_rank: Number of the rank among the ranks on its host.
        store: Host and port of the store that connects ranks on several hosts. None if all ranks are on one host.
        where: Process and host of the rank, as text. It is '' if the rank is on this machine.
    """

    scratch: Path
    environment: Mapping[bytes, bytes]
    local_rank: int
    store: tuple[str, int] | None = None
    where: str = ""


class RankProcess(Forked):
    """A rank's process, with the parent's connection to it and the files that it writes."""

    def __init__(self, pid: int, channel: Channel, end: int, rank: int, place: Place) -> None:
        super().__init__(pid, end)
        self.channel = channel
        self.place = place
        self.output, self.stacks = output_file(place.scratch, rank), stacks_file(place.scratch, rank)

    def close(self) -> None:
        self.channel.close()
        super().close()

    def to_parents_clock(self, at_s: float) -> float:
        """Converts a time, as time.monotonic() gives it on the rank's machine, to the clock of this machine."""
        return at_s

    def bound_output(self) -> None:
        """Truncates a long output, because a rank that executes C code cannot truncate its own output."""
        bound(self.output)

    def last_words(self) -> tuple[str, str]:
        return read_tail(self.output), read_tail(self.stacks)


class Launcher(Protocol):
    """Starts ranks on this machine or on other hosts.

    Attributes:
        ready: First message of the server, which has the way in which ranks are started. None before the first rank.
        is_local: True if the launcher's ranks live on this machine and share its files.
    """

    ready: Ready | None
    is_local: bool

    @property
    def alive(self) -> bool:
        """True if the launcher can still start ranks."""

    def fork_ranks(self, world_size: int, scratch: Sequence[Path]) -> Iterator[RankProcess]:
        """Starts the ranks of a new process group and yields them in order. Each rank waits for its `Start` message.

        Args:
            scratch: Two directories for the ranks, if `is_local` is True. The first is for the harness's files. The
                second is for temporary files.

        Raises:
            BrokenSetup: a rank cannot start. If the rank's host was lost meanwhile, the exception is `HostLost`.
            Misuse: the other hosts have fewer than `world_size` slots.
        """

    def preload(self, modules: Collection[str]) -> None:
        """Imports modules of equivtest before the next fork, so that the forked ranks need not import them."""

    def take_stacks(self, ranks: Mapping[int, RankProcess]) -> dict[int, str]:
        """Returns the Python stacks of running ranks, by rank."""

    def await_certainty(self, ranks: Sequence[RankProcess]) -> None:
        """Waits until each host of a rank has answered, or is known to be lost."""

    def close(self) -> None:
        """Ends the remaining ranks and frees the launcher. A second call does nothing."""
