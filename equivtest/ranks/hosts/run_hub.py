"""Starts the hub of a run, sends requests to the hub, and ends the hub.

This module runs in the process of the run's owner.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from equivtest.base import limits
from equivtest.errors import BrokenSetup, Misuse, reason_of
from equivtest.ranks.channel import close_in_forks
from equivtest.ranks.hosts import hub_messages as messages
from equivtest.ranks.hosts.hub import CLOSE
from equivtest.ranks.hosts.remote import HubDoor
from equivtest.ranks.hosts.secret import FILE_VARIABLE, VARIABLE, read_secret
from equivtest.ranks.launch import execute
from equivtest.ranks.scratch import Scratch, sweep

if TYPE_CHECKING:
    from equivtest.ranks.backend import Backend
    from equivtest.ranks.pool import Pool


class RunHub:
    """Controls a hub process, which lives until this object is closed.

    Args:
        address: Host and port to listen at. The host '' stands for all addresses of this machine, and the port 0 for
            any free port.

    Attributes:
        path: Path of the socket for pools of this machine.
        port: Port at which the hub listens.

    Raises:
        Misuse: the hub cannot listen at the address.
        BrokenSetup: the hub's process does not start.
    """

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        host, port = address
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family, backlog=limits.UNKNOWN_PEERS)
        except (OSError, ValueError) as error:  # ValueError: an invalid host name
            raise Misuse(f"--listen: cannot listen at {host}:{port}: {reason_of(error)}") from error
        self.port: int = listener.getsockname()[1]
        sweep()
        self._scratch = Scratch()
        self.path = str(self._scratch.path / "hub")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        close_in_forks(self._control)
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with listener, theirs, door:
                door.bind(self.path)
                door.listen()
                self._process = self._execute(listener, door, theirs)
            self._control.sendall(secret)
        except OSError as error:
            self._control.close()
            self._scratch.remove()
            raise BrokenSetup(f"cannot start the hub for ranks on other hosts: {error}") from error

    def _execute(self, *passed: socket.socket) -> subprocess.Popen[bytes]:
        fds = tuple(each.fileno() for each in passed)
        arguments = (*fds, os.getpid())
        hidden = (VARIABLE, FILE_VARIABLE)
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        code = f"from equivtest.ranks.hosts.hub import main; main(*{arguments!r})"
        return execute(code, self._scratch.path / "output-hub", environment, fds)

    def __enter__(self) -> RunHub:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def slots(self) -> dict[str, int]:
        """Waits until all slots are connected. Returns the number of slots of each host.

        Raises:
            BrokenSetup: the slots do not connect within limits.HOSTS_S.
        """
        answer = self._ask(messages.AskSlots())
        assert isinstance(answer, messages.Slots)
        return answer.of

    def events(self) -> list[str]:
        with contextlib.suppress(BrokenSetup):
            answer = self._ask(messages.AskEvents())
            assert isinstance(answer, messages.Events)
            return answer.lines
        return ["the hub for ranks on other hosts has ended"]

    def _ask(self, question: messages.FromPool) -> messages.ToPool:
        door = HubDoor(self.path)
        with contextlib.closing(door):
            door.send(question)
            return door.receive()[0]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._control.sendall(CLOSE)
        self._control.close()
        try:
            self._process.wait(limits.STOP_S + limits.FLUSH_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._scratch.remove()


@contextlib.contextmanager
def pool_on_hosts(backend: Backend, listen: str) -> Iterator[Pool]:
    """Yields a pool with ranks on the hosts that connect to the address `listen`.

    If `listen` is '', the ranks are on this machine.

    Raises:
        Misuse: `listen` is no address, there is no secret, or `Pool` raises.
        BrokenSetup: no host connects in time.
    """
    from equivtest.ranks.pool import Pool

    if not listen:
        with Pool(backend) as pool:
            yield pool
        return
    with RunHub(messages.parse_address(listen, "--listen"), read_secret()) as hub:
        hub.slots()
        with Pool(backend, hub=hub.path) as pool:
            yield pool
