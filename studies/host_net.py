"""Makes two hosts from network namespaces of this machine, joined by a bridge whose links can be cut.

A link that is down drops packets silently: no connection ends, none is reset.  The module needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from equivtest.ranks.hosts.secret import VARIABLE

BRIDGE = "equivtest0"
HERE = "10.99.0.1"
SECRET = "of the proof with two namespaces"
RENDEZVOUS = "10.99.0.2:29500"


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
    return done.stdout


@dataclass
class Host:
    """One of the two hosts."""

    number: int
    folder: Path
    torchrun: subprocess.Popen[bytes] | None = None
    seen: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"equivtest-host{self.number}"

    @property
    def link(self) -> str:
        return f"equivtest{self.number}"

    @property
    def address(self) -> str:
        return f"10.99.0.{self.number + 1}"

    @property
    def log(self) -> Path:
        return self.folder / f"torchrun-{self.number}"

    def make(self) -> None:
        _ip("netns", "add", self.name)
        _ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _ip("link", "set", self.link, "master", BRIDGE, "up")
        _ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", self.name, "link", "set", device, "up")

    def remove(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.torchrun is not None:
            self.torchrun.wait(20)
        _ip("link", "del", self.link)  # with its namespace it would go some time later
        _ip("netns", "del", self.name)

    def cut(self) -> None:
        _ip("link", "set", self.link, "down")

    def mend(self) -> None:
        _ip("link", "set", self.link, "up")

    def start(self, port: int, slots: int, restarts: int, patience_s: int = 60) -> None:
        """Starts torchrun on this host, as a user would.  It waits `patience_s` for the other torchrun."""
        temporary = self.folder / f"temporary-{self.number}"
        temporary.mkdir(exist_ok=True)
        conf = f"is_host={int(self.number == 1)},read_timeout={patience_s}"
        command = (
            f"torchrun --nnodes 2 --nproc-per-node {slots} --max-restarts {restarts} --rdzv-backend c10d --rdzv-id x"
        )
        command += f" --rdzv-endpoint {RENDEZVOUS} --rdzv-conf {conf} --local-addr {self.address}"
        command += f" -m equivtest.rank --connect {HERE}:{port}"
        environment = {VARIABLE: SECRET, "GLOO_SOCKET_IFNAME": "eth0", "TMPDIR": str(temporary)}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # otherwise no torchrun can replace one that is gone
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with self.log.open("ab") as log:
            self.torchrun = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command.split()],
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        found = []
        for pid in map(int, _ip("netns", "pids", self.name).split()):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        self.seen |= {process.pid for process in found}
        return found

    def slots(self) -> list[psutil.Process]:
        return [
            process for process in self.processes() if _says(process, "equivtest.rank", "--connect", torchrun=False)
        ]

    def servers(self) -> list[psutil.Process]:
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if _says(process, "ranks.server") and not _says(process.parent() or process, "ranks.server"):
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        found = []
        for server in self.servers():
            with contextlib.suppress(psutil.Error):
                found += server.children()
        return found

    def left(self) -> list[str]:
        """Returns the processes and files that are left of everything that ran on the host."""
        here = {process.pid for process in self.processes()}
        roots = (Path("/dev/shm"), self.folder / f"temporary-{self.number}")
        files = [path for root in roots if root.exists() for path in root.glob("equivtest-*")]
        owned = [str(path) for path in files if int(path.name.split("-")[1]) in self.seen]
        return [f"process {pid}" for pid in sorted(here)] + owned

    def kill(self, process: psutil.Process, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def remove_parents_address() -> None:
    _ip("addr", "del", f"{HERE}/24", "dev", BRIDGE)


def _says(process: psutil.Process, *words: str, torchrun: bool = True) -> bool:
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return all(word in line for word in words) and (torchrun or "torchrun" not in line)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[list[Host]]:
    hosts = [Host(1, folder), Host(2, folder)]
    made = []
    _ip("link", "add", BRIDGE, "type", "bridge")
    try:
        _ip("addr", "add", f"{HERE}/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        for host in hosts:
            host.make()
            made.append(host)
        yield hosts
    finally:
        for host in made:
            host.remove()
        _ip("link", "del", BRIDGE)
