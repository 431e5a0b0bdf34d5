"""What the hub knows of one slot, of one pool and of one rank, and which slots a world gets."""

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
"""That a pipe takes at once.  Source: pipe(7), Linux."""


PACKET_BYTES = 2**17
"""The largest message between a hub and a pool."""


class Gone(Exception):
    """There is no world; `kind` as of `NoWorld`."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(eq=False)
class SlotLink:
    """The connection of a slot.

    Attributes:
        address: Of its host, as seen here.
        gone: Why it is no more; '' while it is there.
        offset_s: What is added to its clock to have this machine's, known as well as a message's way takes.
        stacks: Of its ranks, by token, as they come.
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
        """Notes that something has come; seconds since the last time."""
        before, self._heard_s = self._heard_s, time.monotonic()
        return self._heard_s - before

    def hear_beat(self, beat: messages.Beat) -> None:
        """Has the clocks compared: the quickest answer says most.  Source: RFC 5905, on-wire protocol."""
        now_s = time.monotonic()
        self._answered_s = max(self._answered_s, beat.hub_s)
        if now_s - beat.hub_s <= self._way_s:
            self._way_s = now_s - beat.hub_s
            self.offset_s = (beat.hub_s + now_s) / 2 - beat.slot_s

    async def be_certain(self) -> None:
        """Returns once it has answered to what is sent now, or is gone."""
        asked_s = time.monotonic()
        self.send(messages.Beat(asked_s))
        while not self.gone and self._answered_s < asked_s:
            await asyncio.sleep(limits.WATCH_S / 40)

    def send(self, message: messages.ToSlot) -> None:
        """Puts it behind what is still to be sent."""
        content = messages.encode(message)
        self._outbox.put_nowait(len(content).to_bytes(8, "little") + content)

    async def keep_sending(self) -> None:
        """Sends what is to be sent, until the connection ends."""
        with contextlib.suppress(OSError):  # which whoever receives finds too
            while True:
                await asyncio.get_running_loop().sock_sendall(self.connection, await self._outbox.get())
                self._outbox.task_done()

    async def flushed(self) -> None:
        """Returns once all is sent, or not within limits.FLUSH_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.FLUSH_S):
                await self._outbox.join()

    def shut(self) -> None:
        """Has whoever receives find the end; the connection is closed there."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


@dataclass(eq=False)
class PoolLink:
    """The connection of a pool."""

    connection: socket.socket
    tokens: set[str] = field(default_factory=set)

    async def send(self, message: messages.ToPool, fds: Sequence[int] = ()) -> None:
        while True:
            try:
                socket.send_fds(self.connection, [messages.encode(message)], fds)
            except BlockingIOError:  # it has not read yet what was sent before
                await asyncio.sleep(limits.WATCH_S / 10)
            except OSError:  # it is gone, which `_serve_pool` finds
                return
            else:
                return


@dataclass(eq=False)
class HubRank:
    """A rank that a slot was asked for.

    Attributes:
        forked, connection: Set when the slot has said so, and when it has connected.
        end_r, end_w: A pipe's ends: what can be read once the rank has ended.
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
        """Has the pool read how it ended; without its last words where they are more than a pipe takes."""
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
        """Lets go of what was not handed over."""
        for end in (self.end_r, self.end_w):
            if end >= 0:
                os.close(end)
        self.end_r = self.end_w = -1
        if self.connection.done() and not self.connection.exception():
            self.connection.result().close()


def spread(slots: Sequence[SlotLink], world_size: int) -> list[tuple[SlotLink, int, int, int]]:
    """The slots of a world, as evenly over the hosts as can be, those of a host one after the other.

    Returns:
        By rank: (slot, number of the rank on its host, number of the world's ranks there, number of the host).
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
    """One message of a peer that is known; raises EOFError at its end, ConnectionError where it is too long."""
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
