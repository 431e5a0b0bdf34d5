"""Checks what is left on two hosts after the parent, its hub or a host ends for good.

This module is also the program that runs as the parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from equivtest.base import limits
from equivtest.errors import BrokenSetup
from equivtest.ranks.hosts.run_hub import RunHub
from equivtest.ranks.hosts.secret import VARIABLE
from equivtest.ranks.pool import Pool
from studies.host_net import HERE, SECRET, Host, remove_parents_address, two_hosts
from tests.programs.tiny import PlainCase

PORT = 29600
SLOTS = 2  # of each host
VISIT = "tests.programs.hosts:visit"
READY = "ready"
SOON_S = 10.0  # until nothing is left if hosts hear of the end; most of it is torchrun's own
LATE_S = limits.SILENT_S + limits.RUN_S + 90.0  # if they do not: torchrun takes about a minute more
SLOTS_S = limits.SILENT_S + limits.RUN_S + 10.0  # until no slot is left there
RANKS_S = limits.SILENT_S + 2.0  # until no rank is left if hosts do not hear of the end


def parent() -> int:
    """Runs one case after the other on the ranks of both hosts, until the process is ended."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may make background processes ignore it
    with RunHub((HERE, PORT), SECRET.encode()) as hub:
        hub.slots()
        with Pool(visit=VISIT, hub=hub.path) as pool:
            while True:
                pool.run("", PlainCase(world_size=2 * SLOTS), limit_s=20)
                print(READY, flush=True)


def killed(process: subprocess.Popen[bytes], hosts: list[Host]) -> None:
    process.kill()


def interrupted(process: subprocess.Popen[bytes], hosts: list[Host]) -> None:
    process.send_signal(signal.SIGINT)


def hub_killed(process: subprocess.Popen[bytes], hosts: list[Host]) -> None:
    for child in psutil.Process(process.pid).children():
        if "ranks.hosts.hub" in " ".join(child.cmdline()):
            child.kill()


def cut_off(process: subprocess.Popen[bytes], hosts: list[Host]) -> None:
    """Cuts the parent off for good.  The hosts still reach each other."""
    remove_parents_address()
    process.kill()


def all_cut_off(process: subprocess.Popen[bytes], hosts: list[Host]) -> None:
    """Cuts each host off for good, from the parent and from the other host, so that torchrun does not give up soon."""
    for host in hosts:
        host.cut()
    process.kill()


def host_gone(process: subprocess.Popen[bytes], hosts: list[Host]) -> None:
    hosts[1].cut()
    for each in hosts[1].processes():
        each.kill()


ENDS: dict[Callable[[subprocess.Popen[bytes], list[Host]], None], float] = {
    killed: SOON_S,
    interrupted: SOON_S,
    hub_killed: LATE_S,
    host_gone: limits.HOSTS_S + 300.0 + LATE_S,  # torchrun waits so long for others before it ends
    cut_off: LATE_S,
    all_cut_off: LATE_S,
}
"""Function that ends something -> seconds after which nothing may be left."""


def ends(names: Sequence[str]) -> int:
    bad = 0
    wanted = {end: limit_s for end, limit_s in ENDS.items() if not names or end.__name__ in names}
    for end, limit_s in wanted.items():
        with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as hosts:
            for host in hosts:
                host.start(PORT, SLOTS, 0, patience_s=10)
            process = subprocess.Popen(
                [sys.executable, "-m", "studies.host_ends"],
                env={**os.environ, VARIABLE: SECRET},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            assert process.stdout is not None and process.stderr is not None
            for _ in range(2):
                assert process.stdout.readline().decode().strip() == READY, process.stderr.read().decode()
            ranks = [rank for host in hosts for rank in host.ranks()]
            end(process, hosts)
            ranks_s = _wait(lambda ranks=ranks: [rank for rank in ranks if rank.is_running()], RANKS_S)
            alive = hosts[:1] if end is host_gone else hosts  # a machine without power has no files
            limit_slots_s = limits.HOSTS_S + SLOTS_S if end is host_gone else SLOTS_S
            slots_s = ranks_s + _wait(
                lambda hosts=alive: [slot for host in hosts for slot in host.slots()], limit_slots_s
            )
            left_s = slots_s + _wait(lambda hosts=alive: [line for host in hosts for line in host.left()], limit_s)
            process.communicate(timeout=limits.HOSTS_S + 30)
            left = [line for host in alive for line in host.left()]
            is_bad = ranks_s > RANKS_S or slots_s > limit_slots_s or left_s > limit_s or bool(left)
            bad += is_bad
            print(
                f"{'!' * is_bad:1} {end.__name__:12} ranks gone after {ranks_s:5.1f} s, slots after {slots_s:5.1f} s, "
                f"all after {left_s:5.1f} s; parent's exit code {process.returncode}",
                *left,
                sep="\n    ! ",
                flush=True,
            )
    print(f"{len(wanted)} ends, {bad} not as they should be")
    return int(bad > 0)


def _wait(look: Callable[[], list], limit_s: float) -> float:
    """Returns the seconds until nothing is left, or more than the limit if something still is."""
    begun_s = time.monotonic()
    while look():
        if time.monotonic() - begun_s > limit_s:
            return limit_s + 1
        time.sleep(0.1)
    return time.monotonic() - begun_s


if __name__ == "__main__":
    try:
        sys.exit(parent())
    except BrokenSetup as error:
        print(f"equivtest: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
