"""Runs a slot, which is a process that forks one rank of each world for a run on another host.

The slot connects to the hub of the run and forks ranks from its own server, like a pool that forks ranks on its
machine. The slot opens the connection of each rank to the parent, and passes the connection to the rank. If the hub is
silent for limits.SILENT_S, the ranks end and the slot tries to reconnect. If the slot cannot reconnect within
limits.RUN_S, it ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from equivtest.base import limits
from equivtest.errors import BrokenSetup, Misuse
from equivtest.ranks.channel import Channel
from equivtest.ranks.hosts import hub_messages as messages
from equivtest.ranks.hosts.secret import NotTheSame, introducing
from equivtest.ranks.launch import Server
from equivtest.ranks.messages import Ready
from equivtest.ranks.process import Forked
from equivtest.ranks.scratch import Scratch, temporary_roots
from equivtest.ranks.stacks import output_file, read_tail, stacks_file, take_stacks
from equivtest.ranks.surroundings import bound, end_with_starter, temporary_files_in

OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
"""Environment variables with which torchrun describes its own world; ranks have another world, so they must not see
them."""

RESTARTS, MOST_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"

_decoder = msgspec.msgpack.Decoder(messages.ToSlot)


def hello_of(environment: Mapping[str, str]) -> messages.SlotHello:
    """Returns the message that introduces this slot to the hub, made from the environment variables of torchrun.

    Raises:
        Misuse: torchrun's variables are missing or invalid.
    """
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "GROUP_RANK"):
        text = environment.get(name, "0" if name == "GROUP_RANK" else "")
        if not text.isdecimal():
            raise Misuse(f"{name} must be a number, got {text!r}: start this with torchrun, which sets it")
        numbers[name.lower()] = int(text)
    if numbers["rank"] >= numbers["world_size"]:
        raise Misuse(f"RANK must be below WORLD_SIZE, got {numbers['rank']} of {numbers['world_size']}")
    return messages.SlotHello(
        **numbers,
        host=socket.gethostname(),
        pid=os.getpid(),
        master=environment.get("MASTER_ADDR", "localhost"),
        identity=messages.identity(),
        restarts_left=int(environment.get(MOST_RESTARTS, "0")) - int(environment.get(RESTARTS, "0")),
    )


class Refused(Exception):
    """Raised if the hub rejects this slot or asks for its restart, so a new connection would not help."""


class Slot:
    """Forks ranks on this host for the hub of a run.

    Args:
        limit_s: Seconds during which the slot tries to connect to the hub.
    """

    def __init__(
        self, hello: messages.SlotHello, address: tuple[str, int], secret: bytes, limit_s: float = limits.RUN_S
    ) -> None:
        self._limit_s = limit_s
        self._hello = hello
        self._address = address
        self._secret = secret
        self._servers: dict[messages.Config, Server] = {}
        self._forking = threading.Lock()
        self._sending = threading.Lock()
        self._ranks: dict[str, tuple[Forked, Path]] = {}
        self._threads: list[threading.Thread] = []

    def run(self) -> str:
        """Serves the hub until the run is over.

        The result is '' if the run is over, and otherwise the reason why the slot ended earlier.
        """
        try:
            while True:
                channel = self._connect()
                if channel is None:
                    return f"no run listened at {':'.join(map(str, self._address))} for {self._limit_s:g} s"
                try:
                    if self._serve(channel):
                        return ""
                finally:
                    channel.close()
                    self._end_ranks()
        except Refused as error:
            return str(error)
        finally:
            for server in self._servers.values():
                server.close()

    def _connect(self) -> Channel | None:
        """Opens a connection on which the hub accepts this slot. Returns None if no attempt succeeded in time.

        Raises:
            Refused: the hub has rejected the slot.
        """
        until_s = time.monotonic() + self._limit_s
        while time.monotonic() < until_s:
            with contextlib.suppress(OSError, EOFError), contextlib.ExitStack() as if_it_fails:
                channel = Channel(self._introduced(self._hello), limits.SILENT_S)
                if_it_fails.callback(channel.close)
                answer = _decoder.decode(channel.receive(limits.SILENT_S))
                if isinstance(answer, messages.Refused):
                    raise Refused(answer.reason)
                if_it_fails.pop_all()
                return channel
            time.sleep(limits.WATCH_S)
        return None

    def _introduced(self, hello: messages.Hello) -> socket.socket:
        """Connects to the hub, proves the secret on both sides, sends `hello`, and returns the connection.

        Raises:
            OSError, EOFError: no process listens at the hub's address.
            Refused: one side does not know the secret.
        """
        connection = socket.create_connection(self._address, limits.HANDSHAKE_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            exchange, received = introducing(self._secret), b""
            with contextlib.suppress(StopIteration):
                to_send, num_bytes = next(exchange)
                while True:
                    connection.sendall(to_send)
                    received = _read(connection, num_bytes)
                    to_send, num_bytes = exchange.send(received)
            message = messages.encode(hello)
            connection.sendall(len(message).to_bytes(8, "little") + message)
        except NotTheSame as error:
            connection.close()
            raise Refused(f"{':'.join(map(str, self._address))}: {error}") from None
        except BaseException:
            connection.close()
            raise
        connection.settimeout(None)
        return connection

    def _serve(self, channel: Channel) -> bool:
        """Serves the hub's requests. The result is True if the hub ended the run, and False if the connection ended.

        Raises:
            Refused: torchrun must restart all slots.
        """
        while True:
            try:
                message = _decoder.decode(channel.receive(limits.SILENT_S))
                if isinstance(message, messages.Farewell):
                    return True
                if isinstance(message, messages.Beat):
                    self._send(channel, messages.Beat(message.hub_s, time.monotonic()))
            except (OSError, EOFError):
                return False
            if isinstance(message, messages.Leave):
                raise Refused("slots of other hosts are missing, so torchrun must restart all slots")
            if isinstance(message, messages.Fork):
                self._begin(self._keep_rank, channel, message)
            elif isinstance(message, messages.Kill) and message.token in self._ranks:
                _kill(self._ranks[message.token][0])
            elif isinstance(message, messages.AskStacks):
                self._begin(self._tell_stacks, channel, message.token)

    def _begin(self, work: Callable[..., None], *arguments: Any) -> None:
        """Runs `work` in a thread, so that the slot can answer the hub meanwhile. `work` may take seconds."""
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads = [*(thread for thread in self._threads if thread.is_alive()), thread]
        thread.start()

    def _send(self, channel: Channel, message: messages.FromSlot) -> None:
        with self._sending:
            channel.send(messages.encode(message))

    def _end_ranks(self) -> None:
        for process, _ in list(self._ranks.values()):
            _kill(process)
        until_s = time.monotonic() + limits.STOP_S
        for thread in self._threads:
            thread.join(max(until_s - time.monotonic(), 0.0))

    # Each rank has a thread, from its fork to its end.

    def _keep_rank(self, channel: Channel, wanted: messages.Fork) -> None:
        with contextlib.ExitStack() as at_end, contextlib.suppress(OSError):  # the hub is gone, which `_serve` notices
            try:
                scratch, temporary = Scratch(), Scratch(temporary_roots())
                at_end.callback(scratch.remove)
                at_end.callback(temporary.remove)
                process, ready = self._fork(wanted)
            except (BrokenSetup, Refused, OSError, EOFError) as error:
                self._send(channel, messages.NotForked(wanted.token, str(error)))
                return
            at_end.callback(_end, process)
            output, stacks = output_file(scratch.path, wanted.rank), stacks_file(scratch.path, wanted.rank)
            self._ranks[wanted.token] = process, stacks
            at_end.callback(self._ranks.pop, wanted.token)
            environment = list(temporary_files_in(temporary.path).items())
            told = messages.Forked(wanted.token, process.pid, str(scratch.path), environment, ready)
            self._send(channel, told)
            while not process.wait(limits.BEAT_S):
                bound(output)
            ending = process.ending(time.monotonic())
            words = read_tail(output), read_tail(stacks)
            self._send(channel, messages.Ended(wanted.token, ending.code, ending.at_s, *words))

    def _fork(self, wanted: messages.Fork) -> tuple[Forked, Ready]:
        config = wanted.config
        with self._introduced(messages.RankHello(wanted.token)) as connection, self._forking:
            server = self._servers.get(config)
            if server is None or not server.alive:
                if server is not None:
                    server.close()
                server = Server(config.backend, config.preload, dict(config.environment))
                self._servers[config] = server
            process = server.fork(connection)
            assert server.ready is not None
            return process, server.ready

    def _tell_stacks(self, channel: Channel, token: str) -> None:
        with contextlib.suppress(OSError, KeyError):  # the hub is gone, or the rank has just ended
            process, stacks = self._ranks[token]
            found = take_stacks({0: (process.pid, stacks)})
            self._send(channel, messages.Stacks({token: found[0]}))


def _kill(process: Forked) -> None:
    """Kills a rank that has not ended. After its end, another process may have the same process id."""
    if not process.wait(0.0):
        process.kill()


def _end(process: Forked) -> None:
    """Kills a rank that lives on because the hub or its server is gone, and frees the rank's descriptors."""
    if not process.wait(0.0) or not process.ending(time.monotonic()).is_certain:
        process.kill()
    process.close()


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        part = connection.recv(num_bytes - len(received))
        if not part:
            raise EOFError("the other end is closed")
        received += part
    return received


def keep_slot(address: tuple[str, int], secret: bytes) -> int:
    """Runs the slot that torchrun's environment variables describe. Returns the exit code."""
    hello = hello_of(os.environ)
    limit_s = limits.RUN_S if os.environ.get(RESTARTS, "0") == "0" else limits.RUN_AGAIN_S
    for name in OF_TORCHRUN:
        os.environ.pop(name, None)
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    end_with_starter()
    problem = Slot(hello, address, secret, limit_s).run()
    if problem:
        print(f"equivtest: slot {hello.rank} on {hello.host}: {problem}", file=sys.stderr, flush=True)  # noqa: T201
    return 2 if problem else 0
