"""Slots of a run on this machine without torchrun, behind a relay that can be cut."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

from equivtest.ranks.hosts.run_hub import RunHub
from equivtest.ranks.hosts.secret import VARIABLE

SECRET = "of the tests of ranks on other hosts"


class Relay:
    """Forwards traffic between its port and a hub's, until it is cut."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                pair = ours, socket.create_connection(("127.0.0.1", self._to))
                self._pairs.append(pair)
                threading.Thread(target=self._hand_on, args=pair, daemon=True).start()

    def _hand_on(self, one: socket.socket, other: socket.socket) -> None:
        to = {one: other, other: one}
        with one, other, contextlib.suppress(OSError, ValueError):
            while True:
                for each in select.select(to, [], [])[0]:
                    part = each.recv(2**16)
                    if not part:
                        return
                    to[each].sendall(part)

    def cut(self) -> None:
        """Ends every present connection; later ones are forwarded."""
        pairs, self._pairs = self._pairs, []
        for each in (each for pair in pairs for each in pair):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()


@contextlib.contextmanager
def slots_of(hub: RunHub, relays: list[Relay], **environment: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts as many slots as relays, each on its own simulated host; they end with the hub."""
    processes = []
    try:
        for rank, relay in enumerate(relays):
            numbers = {"RANK": str(rank), "WORLD_SIZE": str(len(relays)), "GROUP_RANK": str(rank)}
            numbers |= {"MASTER_ADDR": "127.0.0.1", VARIABLE: SECRET}
            command = [sys.executable, "-m", "equivtest.rank", "--connect", f"127.0.0.1:{relay.port}"]
            processes.append(subprocess.Popen(command, env={**os.environ, **numbers, **environment}))
        yield processes
    finally:
        hub.close()
        for process in processes:
            try:
                process.wait(20)
            finally:
                process.kill()
