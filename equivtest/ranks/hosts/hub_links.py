"""Defines the state that the hub of a run has for each slot, pool and rank, and chooses slots for ranks.

A slot is a process on a host that forks ranks there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from equivtest.base import limits
from equivtest.ranks.hosts import hub_messages as messages

PIPE_BYTES = 2**16
"""Capacity of a pipe, in bytes.  Source: pipe(7), Linux."""


PACKET_BYTES = 2**17
"""Size of the largest message between a hub and a pool, in bytes."""


class Gone(Exception):
    """Raised if the hub cannot provide the ranks that a pool requested. `NoWorld` describes `kind`."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(eq=False)
class SlotLink:
    """The hub's connection to a slot, which is a process on a host that forks ranks there.

    Attributes:
        address: Address of the slot's host, as this machine sees it.
        gone: The reason why the slot was lost. It is '' while the slot is connected.
        offset_s: Seconds to add to the clock of the slot's host to get the clock of this machine. The error is at most
            the time of one message.
        stacks: Python stacks of the slot's ranks, which are added when they arrive. The key is the token, the hub's
            name for a rank.
    """

    connection: socket.socket
    hello: messages.SlotHello
    address: str
    gone: str = ""
    offset_s: float = 0.0
    stacks: dict[str, str] = field(default_factory=dict)
    _way_s: float = float("inf")
    _heard_s: float = field(default_factory=time.monotonic)
    _answered_s: float = 0.0
    _outbox: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)

    @property
    def host(self) -> str:
        return f"{self.hello.host} ({self.address})"

    def __str__(self) -> str:
        return f"slot {self.hello.rank} (process {self.hello.pid} on {self.host})"

    def hear(self) -> float:
        """Records that a message has arrived. Returns the seconds since the previous message."""
        before, self._heard_s = self._heard_s, time.monotonic()
        return self._heard_s - before

    def hear_beat(self, beat: messages.Beat) -> None:
        """Computes the difference between the two hosts' clocks from the answer to a beat.

        Only the fastest answer so far counts.

        Source: RFC 5905, on-wire protocol.
        """
        now_s = time.monotonic()
        self._answered_s = max(self._answered_s, beat.hub_s)
        if now_s - beat.hub_s <= self._way_s:
            self._way_s = now_s - beat.hub_s
            self.offset_s = (beat.hub_s + now_s) / 2 - beat.slot_s

    async def be_certain(self) -> None:
        asked_s = time.monotonic()
        self.send(messages.Beat(asked_s))
        while not self.gone and self._answered_s < asked_s:
            await asyncio.sleep(limits.WATCH_S / 40)

    def send(self, message: messages.ToSlot) -> None:
        content = messages.encode(message)
        self._outbox.put_nowait(len(content).to_bytes(8, "little") + content)

    async def keep_sending(self) -> None:
        with contextlib.suppress(OSError):  # the receiving task notices it too
            while True:
                await asyncio.get_running_loop().sock_sendall(self.connection, await self._outbox.get())
                self._outbox.task_done()

    async def flushed(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.FLUSH_S):
                await self._outbox.join()

    def shut(self) -> None:
        """Shuts the connection down. The receiving task notices this and closes the connection."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


@dataclass(eq=False)
class PoolLink:
    """The hub's connection to a pool of this machine, and the tokens (the hub's names) of the pool's ranks."""

    connection: socket.socket
    tokens: set[str] = field(default_factory=set)

    async def send(self, message: messages.ToPool, fds: Sequence[int] = ()) -> None:
        while True:
            try:
                socket.send_fds(self.connection, [messages.encode(message)], fds)
            except BlockingIOError:  # it has not read the previous messages yet
                await asyncio.sleep(limits.WATCH_S / 10)
            except OSError:  # it is gone, which `_serve_pool` notices
                return
            else:
                return


@dataclass(eq=False)
class HubRank:
    """A rank that the hub has requested from a slot.

    Attributes:
        forked, connection: Futures. `forked` is set once the slot has forked the rank. `connection` is set once the
            rank has connected.
        end_r, end_w: The ends of a pipe. The pipe becomes readable once the rank has ended.
    """

    token: str
    slot: SlotLink
    number: int
    where: str = ""
    forked: asyncio.Future[messages.Forked] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    connection: asyncio.Future[socket.socket] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def __post_init__(self) -> None:
        self.end_r, self.end_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __str__(self) -> str:
        return f"rank {self.number} ({self.where})" if self.where else f"rank {self.number}"

    def tell(self, ended: messages.Ended) -> None:
        """Writes `ended`, a report of the rank's end, to the pipe. The pool reads the pipe.

        The rank's output and stacks are left out if they exceed the pipe's capacity.
        """
        if self.end_w < 0:
            return
        message = messages.encode(ended)
        if len(message) > PIPE_BYTES:
            message = messages.encode(msgspec.structs.replace(ended, output="", stacks=""))
        with contextlib.suppress(OSError):  # the pool no longer cares
            os.write(self.end_w, message)
        os.close(self.end_w)
        self.end_w = -1

    def drop(self) -> None:
        for end in (self.end_r, self.end_w):
            if end >= 0:
                os.close(end)
        self.end_r = self.end_w = -1
        if self.connection.done() and not self.connection.exception():
            self.connection.result().close()


def spread(slots: Sequence[SlotLink], world_size: int) -> list[tuple[SlotLink, int, int, int]]:
    """Chooses a slot for each rank of a world, spread evenly over the hosts.

    Ranks of one host have consecutive numbers.

    Returns:
        (slot, index of the rank on its host, number of ranks of the world on that host, index of the host) for each
        rank.
    """
    hosts: dict[int, list[SlotLink]] = {}
    for slot in slots:
        hosts.setdefault(slot.hello.group_rank, []).append(slot)
    counts = dict.fromkeys(sorted(hosts), 0)
    for _ in range(world_size):
        free = [host for host in counts if counts[host] < len(hosts[host])]
        counts[min(free, key=lambda host: counts[host])] += 1
    used = [host for host in counts if counts[host]]
    return [
        (hosts[host][number], number, counts[host], group)
        for group, host in enumerate(used)
        for number in range(counts[host])
    ]


async def receive(connection: socket.socket) -> bytes:
    """Receives one message of a peer that has proved that it knows the secret.

    Raises:
        EOFError: the peer closed the connection.
        ConnectionError: the message is longer than limits.MESSAGE_BYTES.
    """
    length = int.from_bytes(await read(connection, 8), "little")
    if length > limits.MESSAGE_BYTES:
        raise ConnectionError(f"a message of {length} bytes")
    return await read(connection, length)


async def read(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        part = await asyncio.get_running_loop().sock_recv(connection, num_bytes - len(received))
        if not part:
            raise EOFError("it closed the connection")
        received += part
    return received
