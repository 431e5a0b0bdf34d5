"""Represents, in a pool, the ranks that run on other hosts. The pool reaches these ranks through the hub."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from equivtest.base import limits
from equivtest.errors import BrokenSetup, HostLost, Misuse
from equivtest.ranks.channel import Channel, close_in_forks
from equivtest.ranks.hosts import hub_messages as messages
from equivtest.ranks.hosts.hub_links import PACKET_BYTES
from equivtest.ranks.messages import Ready, Serve, encode_request
from equivtest.ranks.process import Ending, Place, RankProcess

_ERRORS = {"misuse": Misuse, "broken": BrokenSetup, "lost": HostLost}
_decoder = msgspec.msgpack.Decoder(messages.ToPool)


class HubDoor:
    """A pool's connection to the hub of this machine.

    Raises:
        BrokenSetup: no process listens at the socket.
    """

    def __init__(self, path: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        close_in_forks(self._connection)
        self._connection.settimeout(limits.HOSTS_S + 2 * limits.START_S + limits.STOP_S)
        try:
            self._connection.connect(path)
        except OSError as error:
            self._connection.close()
            raise BrokenSetup(f"the hub for ranks on other hosts is gone: {error}") from error
        self.alive = True

    def send(self, message: messages.FromPool) -> None:
        try:
            self._connection.sendall(messages.encode(message))
        except OSError:
            self.alive = False

    def receive(self) -> tuple[messages.ToPool, list[int]]:
        """Returns the hub's next answer, and the descriptors that came with it.

        Raises:
            BrokenSetup: the hub has ended or does not answer.
            Misuse, BrokenSetup, HostLost: the hub answers `NoWorld`. The `kind` of the answer determines which of these
                exceptions is raised.
        """
        try:
            packet, fds, _, _ = socket.recv_fds(self._connection, PACKET_BYTES, 2)
        except OSError as error:
            packet, fds, reason = b"", [], str(error)
        else:
            reason = "it has ended"
        if not packet:
            self.alive = False
            raise BrokenSetup(f"the hub for ranks on other hosts does not answer: {reason}")
        answer = _decoder.decode(packet)
        if isinstance(answer, messages.NoWorld):
            raise _ERRORS[answer.kind](answer.reason)
        return answer, fds

    def close(self) -> None:
        self.alive = False
        self._connection.close()


class RemoteRank(RankProcess):
    """One rank on another host. The hub passes requests on to the rank's process."""

    def __init__(self, told: messages.Rank, channel: Channel, end: int, door: HubDoor, place: Place, rank: int) -> None:
        super().__init__(told.forked.pid, channel, end, rank, place)
        os.set_blocking(end, True)
        self.token = told.forked.token
        self._offset_s = told.offset_s
        self._door = door
        self._last_words = ("", "")

    def _read_ending(self, now_s: float) -> Ending:
        data = b"".join(iter(lambda: os.read(self.end, PACKET_BYTES), b""))
        if not data:
            return Ending(None, now_s, "lost with the hub of this run")
        ended = msgspec.msgpack.decode(data, type=messages.Ended)
        self._last_words = (ended.output, ended.stacks)
        return Ending(ended.code, ended.at_s, ended.cut_off)

    def kill(self) -> None:
        self._door.send(messages.KillRanks([self.token]))

    def to_parents_clock(self, at_s: float) -> float:
        return at_s + self._offset_s

    def bound_output(self) -> None:
        """Does nothing, because the slot truncates the output."""

    def last_words(self) -> tuple[str, str]:
        return self._last_words


class HubServer:
    """Starts ranks on other hosts for a pool. `Launcher` describes the methods."""

    is_local = False

    def __init__(self, path: str, config: messages.Config) -> None:
        self._door = HubDoor(path)
        self._config = config
        self.ready: Ready | None = None

    @property
    def alive(self) -> bool:
        return self._door.alive

    def fork_ranks(self, world_size: int, scratch: Sequence[Path]) -> Iterator[RankProcess]:
        """Requests all ranks of a world from the hub at once, and yields the ranks in order.

        Each rank waits for its `Start` message. Rank 0 serves the store through which the ranks find each other.
        """
        with contextlib.ExitStack() as if_it_fails:
            told: list[tuple[messages.Rank, Channel, int]] = []
            self._door.send(messages.AskWorld(world_size, self._config))
            while len(told) < world_size:
                answer, (connection, end) = self._door.receive()
                assert isinstance(answer, messages.Rank)
                channel = Channel(socket.socket(fileno=connection), limits.SEND_S)
                if_it_fails.callback(os.close, end)
                if_it_fails.callback(channel.close)
                told.append((answer, channel, end))
            self.ready = told[0][0].forked.ready
            port = _served_port(told[0][0].master, told[0][1], told[0][2])
            ranks = [
                RemoteRank(answer, channel, end, self._door, _place_of(answer, port), rank)
                for rank, (answer, channel, end) in enumerate(told)
            ]
            if_it_fails.pop_all()
        yield from ranks

    def preload(self, modules: Collection[str]) -> None:
        """Does nothing, because ranks on other hosts are not forked from a server of this pool."""

    def take_stacks(self, ranks: Mapping[int, RankProcess]) -> dict[int, str]:
        tokens = {rank: process.token for rank, process in ranks.items() if isinstance(process, RemoteRank)}
        self._door.send(messages.AskStacksOf(list(tokens.values())))
        found, _ = self._door.receive()
        assert isinstance(found, messages.Stacks)
        return {rank: found.of.get(token, "no stacks: its host did not send any") for rank, token in tokens.items()}

    def await_certainty(self, ranks: Sequence[RankProcess]) -> None:
        self._door.send(messages.AskCertainty([rank.token for rank in ranks if isinstance(rank, RemoteRank)]))
        self._door.receive()

    def close(self) -> None:
        self._door.close()


def _served_port(host: str, channel: Channel, end: int) -> int:
    """Makes rank 0 serve a store, and returns the store's port.

    Raises:
        HostLost: the rank has ended, or does not answer.
    """
    poll = select.poll()
    poll.register(end, select.POLLIN)
    poll.register(channel, select.POLLIN)
    try:
        channel.send(encode_request(Serve(host)))
        ready = dict(poll.poll(limits.START_S * 1000))
        if ready and end not in ready:
            return int(channel.receive(limits.HANDSHAKE_S))
    except (OSError, EOFError):
        pass
    raise HostLost("rank 0 ended before it started its TCPStore")


def _place_of(told: messages.Rank, port: int) -> Place:
    numbers = {
        b"LOCAL_RANK": told.local_rank,
        b"LOCAL_WORLD_SIZE": told.local_world_size,
        b"GROUP_RANK": told.group_rank,
    }
    return Place(
        scratch=Path(told.forked.scratch),
        environment=dict(told.forked.environment) | {name: str(value).encode() for name, value in numbers.items()},
        local_rank=told.local_rank,
        store=(told.master, port),
        where=told.where,
    )
