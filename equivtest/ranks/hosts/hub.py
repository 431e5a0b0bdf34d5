"""The hub of a run, which is a process beside the parent that provides ranks on other hosts.

The hub listens for slots (`equivtest.ranks.hosts.slot`) at one port, and for pools of this machine at a socket in a
directory of the run's owner. If a pool requests a world, the pool receives a connection to each rank, and a pipe that
reports the rank's end. The pool closes both.  The hub and each slot exchange a message every limits.BEAT_S, so that the
hub knows which hosts are still connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from equivtest.base import limits
from equivtest.ranks.failure import clip
from equivtest.ranks.hosts import hub_messages as messages
from equivtest.ranks.hosts.hub_links import PACKET_BYTES, Gone, HubRank, PoolLink, SlotLink, read, receive, spread
from equivtest.ranks.hosts.secret import NotTheSame, admitting
from equivtest.ranks.scratch import sweep_after

CLOSE = b"c"
"""Message of the owner to the hub: the run is over."""

_hello_decoder = msgspec.msgpack.Decoder(messages.Hello)
_slot_decoder = msgspec.msgpack.Decoder(messages.FromSlot)
_pool_decoder = msgspec.msgpack.Decoder(messages.FromPool)


class Hub:
    """Connects the slots on other hosts with the pools of this machine, and keeps track of slots, pools and ranks."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._identity = messages.identity()
        self._slots: dict[int, SlotLink] = {}
        self._ranks: dict[str, HubRank] = {}
        self._events: dict[str, None] = {}  # in order, without duplicates
        self._num_unknown = 0
        self._changed_s = 0.0  # last time that a slot came or went
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket, door: socket.socket, control: socket.socket) -> bool:
        """Serves slots and pools until the run's owner is gone. Returns True if the owner has ended the run."""
        loop = asyncio.get_running_loop()
        for each in (listener, door, control):
            each.settimeout(0)
        self._begin(self._accept(listener, self._admit))
        self._begin(self._accept(door, self._serve_pool))
        try:
            word = await loop.sock_recv(control, 1)
        except OSError:
            word = b""
        for slot in self._slots.values():
            slot.send(messages.Farewell())
        until_s = time.monotonic() + limits.FLUSH_S
        while self._slots and time.monotonic() < until_s:  # they close their connections
            await asyncio.sleep(limits.WATCH_S / 10)
        return word == CLOSE

    def _begin(self, coroutine: Any) -> None:
        """Starts a task and keeps a reference to the task until the task ends."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket, serve: Any) -> None:
        while True:
            try:
                connection, address = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:  # this process has no free descriptor now, or the peer is already gone
                await asyncio.sleep(limits.WATCH_S)
                continue
            connection.settimeout(0)
            self._begin(serve(connection, str(address[0]) if address else ""))

    # Unknown peers at the port.

    async def _admit(self, connection: socket.socket, peer: str) -> None:
        if self._num_unknown >= limits.UNKNOWN_PEERS:
            connection.close()
            return
        self._num_unknown += 1
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(limits.HANDSHAKE_S):
                await self._challenge(connection)
                hello = _hello_decoder.decode(await receive(connection))
        except (NotTheSame, OSError, EOFError, TimeoutError, msgspec.DecodeError) as error:
            connection.close()
            self._note(f"a connection from {peer} was refused: {error or 'it sent nothing'}")
            return
        finally:
            self._num_unknown -= 1
        if isinstance(hello, messages.SlotHello):
            await self._serve_slot(SlotLink(connection, hello, peer))
        elif (rank := self._ranks.get(hello.token)) is not None and not rank.connection.done():
            rank.connection.set_result(connection)
        else:
            connection.close()

    async def _challenge(self, connection: socket.socket) -> None:
        """Raises NotTheSame unless the process at the other end of `connection` proves that it knows the secret."""
        loop, received, exchange = asyncio.get_running_loop(), b"", admitting(self._secret)
        to_send, num_bytes = next(exchange)
        with contextlib.suppress(StopIteration):
            while True:
                await loop.sock_sendall(connection, to_send)
                received = await read(connection, num_bytes)
                to_send, num_bytes = exchange.send(received)

    # Slots.

    async def _serve_slot(self, slot: SlotLink) -> None:
        tasks = [asyncio.ensure_future(slot.keep_sending()), asyncio.ensure_future(self._keep_beating(slot))]
        try:
            if reason := self._why_not(slot):
                self._note(f"{slot} was refused: {reason}")
                slot.send(messages.Refused(reason))
                await slot.flushed()
                return
            if (former := self._slots.get(slot.hello.rank)) is not None:
                self._lose(former, "another process has its slot now")
            self._slots[slot.hello.rank], self._changed_s = slot, time.monotonic()
            slot.send(messages.Welcome())
            await self._listen(slot)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            slot.connection.close()

    async def _listen(self, slot: SlotLink) -> None:
        try:
            while True:
                async with asyncio.timeout(limits.SILENT_S):
                    message = _slot_decoder.decode(await receive(slot.connection))
                if (silence_s := slot.hear()) > limits.SLOW_S:
                    self._note(f"{slot} was silent for {silence_s:.1f} s")
                await self._hear(slot, message)
        except TimeoutError as error:
            why = f"it was silent for {limits.SILENT_S:g} s" if error.errno is None else str(error)
            self._lose(slot, why)
        except (EOFError, ConnectionError):
            self._lose(slot, "its process ended, or closed its connection")
        except (OSError, msgspec.DecodeError) as error:
            self._lose(slot, f"{type(error).__name__}: {error}")

    def _why_not(self, slot: SlotLink) -> str:
        hello, others = slot.hello, [each for each in self._slots.values() if each.hello.rank != slot.hello.rank]
        if hello.identity != self._identity:
            return f"it runs {hello.identity}, but the run {self._identity}"
        if hello.world_size > limits.MAX_WORLD_SIZE:
            return f"it is one of {hello.world_size} slots, but at most {limits.MAX_WORLD_SIZE} can take part"
        sizes = {each.hello.world_size for each in others} - {hello.world_size}
        if not sizes:
            return ""
        return f"it is one of {hello.world_size} slots, but others are of {sizes.pop()}: start all by one torchrun"

    async def _keep_beating(self, slot: SlotLink) -> None:
        while True:
            await asyncio.sleep(limits.BEAT_S)
            slot.send(messages.Beat(time.monotonic()))

    async def _hear(self, slot: SlotLink, message: messages.FromSlot) -> None:
        if isinstance(message, messages.Beat):
            slot.hear_beat(message)
        elif isinstance(message, messages.Stacks):
            slot.stacks |= message.of
        elif (rank := self._ranks.get(message.token)) is None:
            return
        elif isinstance(message, messages.Ended):
            self._end(rank, msgspec.structs.replace(message, at_s=message.at_s + slot.offset_s))
        elif not rank.forked.done():
            if isinstance(message, messages.Forked):
                rank.forked.set_result(message)
            else:
                rank.forked.set_exception(Gone("broken", f"{slot}: {message.reason}"))

    def _lose(self, slot: SlotLink, why: str) -> None:
        if slot.gone:
            return
        slot.gone, self._changed_s = why, time.monotonic()
        if self._slots.get(slot.hello.rank) is slot:
            del self._slots[slot.hello.rank]
        slot.shut()
        told = []
        for rank in [rank for rank in self._ranks.values() if rank.slot is slot]:
            told.append(str(rank))
            ended = messages.Ended(rank.token, None, time.monotonic(), cut_off=f"lost with {slot}: {why}")
            self._end(rank, ended)
        self._note(f"{slot} was lost{', with ' * bool(told)}{', '.join(told)}: {why}")

    def _end(self, rank: HubRank, ended: messages.Ended) -> None:
        self._ranks.pop(rank.token, None)
        for future in (rank.forked, rank.connection):
            if not future.done():
                future.set_exception(Gone("lost" if ended.cut_off else "broken", ended.cut_off or "it has ended"))
        rank.tell(ended)

    # Pools.

    async def _serve_pool(self, connection: socket.socket, _: str) -> None:
        pool = PoolLink(connection)
        try:
            while packet := await asyncio.get_running_loop().sock_recv(connection, PACKET_BYTES):
                await self._answer(pool, _pool_decoder.decode(packet))
        except OSError:
            pass
        finally:
            self._kill(pool.tokens)
            connection.close()

    async def _answer(self, pool: PoolLink, asked: messages.FromPool) -> None:
        """Answers one request of a pool. The pool sends its next request only after the answer."""
        try:
            if isinstance(asked, messages.AskWorld):
                await self._give_world(pool, asked)
            elif isinstance(asked, messages.KillRanks):
                self._kill(asked.tokens)
            elif isinstance(asked, messages.AskStacksOf):
                await pool.send(messages.Stacks(await self._stacks_of(asked.tokens)))
            elif isinstance(asked, messages.AskCertainty):
                await asyncio.gather(*(slot.be_certain() for slot in self._slots_of(asked.tokens)))
                await pool.send(messages.Certain())
            elif isinstance(asked, messages.AskSlots):
                slots = await self._all_slots()
                names = dict.fromkeys(slot.host for slot in slots)
                await pool.send(messages.Slots({name: sum(slot.host == name for slot in slots) for name in names}))
            else:
                await pool.send(messages.Events(list(self._events)))
        except Gone as error:
            await pool.send(messages.NoWorld(error.kind, str(error)))

    async def _all_slots(self) -> list[SlotLink]:
        """Waits until all slots are connected, and returns them in order of rank.

        Raises:
            Gone: not all slots connect within limits.HOSTS_S.
        """
        until_s = time.monotonic() + limits.HOSTS_S
        while True:
            wanted = next((slot.hello.world_size for slot in self._slots.values()), 0)
            if wanted and len(self._slots) == wanted:
                return [self._slots[rank] for rank in sorted(self._slots)]
            if time.monotonic() - self._changed_s > limits.TOGETHER_S:
                self._start_anew()
            if time.monotonic() > until_s:
                raise Gone("broken", self._what_is_missing(wanted))
            await asyncio.sleep(limits.WATCH_S / 10)

    def _start_anew(self) -> None:
        """Makes torchrun restart all slots, because a slot that was cut off for some time does not rejoin the others.

        torchrun runs an agent beside each slot. If a slot is lost, the agents of the other slots drop it, and the agent
        of the lost slot does not ask to join again.  Source: _sanitize in
        torch/distributed/elastic/rendezvous/dynamic_rendezvous.py, _invoke_run in
        torch/distributed/elastic/agent/server/api.py (2.13.0).
        """
        self._changed_s = time.monotonic()
        if all(slot.hello.restarts_left > 0 for slot in self._slots.values()):
            for slot in self._slots.values():
                self._note(f"{slot} restarts, since other slots are missing")
                slot.send(messages.Leave())

    def _what_is_missing(self, wanted: int) -> str:
        said = "".join(f"; {event}" for event in list(self._events)[-3:])
        if not wanted:
            return f"no slot has connected within {limits.HOSTS_S:g} s{said}"
        missing = ", ".join(str(rank) for rank in range(wanted) if rank not in self._slots)
        return f"of {wanted} slots these have not connected within {limits.HOSTS_S:g} s: {missing}{said}"

    async def _give_world(self, pool: PoolLink, asked: messages.AskWorld) -> None:
        slots = await self._all_slots()
        if asked.world_size > len(slots):
            ways = "start torchrun with more, or choose smaller --world-sizes"
            raise Gone(
                "misuse", f"a world of {asked.world_size} ranks is needed, but {len(slots)} slots are connected: {ways}"
            )
        dealt = spread(slots, asked.world_size)
        ranks = [HubRank(secrets.token_hex(16), slot, number) for number, (slot, _, _, _) in enumerate(dealt)]
        try:
            for rank in ranks:
                self._ranks[rank.token] = rank
                pool.tokens.add(rank.token)
                rank.slot.send(messages.Fork(rank.token, rank.number, asked.config))
            async with asyncio.timeout(2 * limits.START_S):
                await asyncio.gather(*(rank.forked for rank in ranks), *(rank.connection for rank in ranks))
        except (Gone, TimeoutError) as error:
            self._kill([rank.token for rank in ranks])
            for rank in ranks:
                self._ranks.pop(rank.token, None)
                rank.drop()
            raise (
                error
                if isinstance(error, Gone)
                else Gone("broken", f"a host did not fork its ranks within {2 * limits.START_S:g} s")
            ) from None
        for rank, (slot, local_rank, local_size, group) in zip(ranks, dealt, strict=True):
            forked = rank.forked.result()
            where = f"process {forked.pid} on {slot.host}"
            rank.where = where
            told = messages.Rank(forked, where, slot.offset_s, local_rank, local_size, group, slots[0].hello.master)
            with rank.connection.result() as connection:
                await pool.send(told, [connection.fileno(), rank.end_r])
            os.close(rank.end_r)
            rank.end_r = -1

    def _slots_of(self, tokens: Sequence[str]) -> list[SlotLink]:
        return list({id(rank.slot): rank.slot for rank in self._ranks_of(tokens)}.values())

    def _ranks_of(self, tokens: Iterator[str] | Sequence[str] | set[str]) -> list[HubRank]:
        return [self._ranks[token] for token in tokens if token in self._ranks]

    def _kill(self, tokens: Sequence[str] | set[str]) -> None:
        for rank in self._ranks_of(tokens):
            rank.slot.send(messages.Kill(rank.token))

    async def _stacks_of(self, tokens: Sequence[str]) -> dict[str, str]:
        asked = self._ranks_of(tokens)
        for rank in asked:
            rank.slot.stacks.pop(rank.token, None)
            rank.slot.send(messages.AskStacks(rank.token))
        until_s = time.monotonic() + limits.STACKS_S + limits.GRACE_S
        while time.monotonic() < until_s and any(rank.token not in rank.slot.stacks for rank in asked):
            await asyncio.sleep(limits.WATCH_S / 10)
        return {rank.token: text for rank in asked if (text := rank.slot.stacks.pop(rank.token, ""))}

    def _note(self, text: str) -> None:
        """Records an event, up to limits.MOST_EVENTS, so that strangers who connect cannot fill the memory."""
        if len(self._events) < limits.MOST_EVENTS:
            self._events[clip(text, limits.EVENT_CHARS)] = None


def main(listener: int, door: int, control: int, owner: int) -> None:
    """Runs the hub until its owner is gone, then ends the process.

    Args:
        listener: Descriptor of the socket at which slots connect.
        door: Descriptor of the socket at which pools connect.
        control: Descriptor of the connection to the owner, over which the secret arrives first.
        owner: Process id of the owner. If the owner ends without closing the hub, the owner's scratch directories are
            removed.
    """
    ours = socket.socket(fileno=control)
    secret = ours.recv(PACKET_BYTES)
    on_purpose = bool(secret) and asyncio.run(
        Hub(secret).serve(socket.socket(fileno=listener), socket.socket(fileno=door), ours)
    )
    if not on_purpose:
        sweep_after(owner)
    os._exit(0)
