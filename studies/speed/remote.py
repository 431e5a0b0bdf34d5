"""Measures the cost of ranks on other hosts: the same cases run there and on ranks of this machine, in turn.

The hosts are this machine too, reached over loopback.  So the study measures the harness with replies over TCP instead
of shared memory, but no network.  Each measurement starts in a fresh world, as in `throughput`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from equivtest.base import limits
from equivtest.property import Property
from equivtest.ranks.hosts.run_hub import RunHub
from equivtest.ranks.hosts.secret import VARIABLE
from equivtest.ranks.pool import Pool
from studies.speed.measure import Spread, draw_cases, main_properties, seconds_of
from studies.speed.throughput import run_harness, start_fresh_world

VISIT = "studies.speed.programs:visit_one_or_list"
WORLD_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Distant:
    """Seconds of each repetition for one subject on one world size, with ranks over TCP and with ranks of this machine.

    Attributes:
        start: Time to a new world's first answer over TCP, as a multiple of the time without TCP.
    """

    subject: str
    world_size: int
    num_cases: int
    remote_s: tuple[float, ...]
    local_s: tuple[float, ...]
    start: Spread

    @property
    def ratio(self) -> Spread:
        """Throughput over TCP as a fraction of the throughput without TCP, repetition by repetition."""
        return Spread.of(local / remote for remote, local in zip(self.remote_s, self.local_s, strict=True))


def measure_remote(repeats: int, num_cases: int, subjects: Collection[str]) -> list[Distant]:
    """Measures the throughput of ranks over TCP and of local ranks, for each subject on each of WORLD_SIZES."""
    with (
        _hub(max(WORLD_SIZES)) as hub,
        Pool(max_worlds=1, visit=VISIT) as local,
        Pool(max_worlds=1, visit=VISIT, hub=hub.path) as remote,
    ):
        return [
            _measure(remote, local, prop, world_size, repeats, num_cases)
            for world_size in WORLD_SIZES
            for prop in main_properties(subjects)
        ]


@contextlib.contextmanager
def _hub(num_slots: int) -> Iterator[RunHub]:
    """Starts a hub and as many slots as `num_slots`.  Each slot counts as a separate host."""
    secret, processes = secrets.token_hex(16), []
    try:
        with RunHub(("127.0.0.1", 0), secret.encode()) as hub:
            for rank in range(num_slots):
                told = {"RANK": rank, "WORLD_SIZE": num_slots, "GROUP_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
                environment = {**os.environ, **{name: str(value) for name, value in told.items()}, VARIABLE: secret}
                command = [sys.executable, "-m", "equivtest.rank", "--connect", f"127.0.0.1:{hub.port}"]
                processes.append(subprocess.Popen(command, env=environment))
            yield hub
    finally:
        for process in processes:
            process.wait(limits.HOSTS_S)


def _measure(remote: Pool, local: Pool, prop: Property, world_size: int, repeats: int, num_cases: int) -> Distant:
    cases = draw_cases(prop, world_size, num_cases)
    starts_s: dict[Pool, list[float]] = {remote: [], local: []}
    runs_s: dict[Pool, list[float]] = {remote: [], local: []}
    for repeat in range(repeats + 1):  # the first repetition only imports and probes
        for pool in (remote, local) if repeat % 2 == 0 else (local, remote):
            starts_s[pool].append(seconds_of(functools.partial(start_fresh_world, pool, world_size)))
            runs_s[pool].append(seconds_of(functools.partial(run_harness, pool, prop, cases)))
    start = Spread.of(there / here for there, here in zip(starts_s[remote][1:], starts_s[local][1:], strict=True))
    return Distant(prop.subject, world_size, len(cases), tuple(runs_s[remote][1:]), tuple(runs_s[local][1:]), start)
