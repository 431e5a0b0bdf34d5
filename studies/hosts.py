"""Runs ranks on two hosts by torchrun, and causes troubles there: `python -m studies.hosts troubles`.

    troubles   20 kills, cuts and delays at random moments: each is named, nothing hangs, nothing is left
    ends ...   what is left on the hosts when the parent is ended or cut off; the named ends, or all
    run ...    `equivtest run ...` with ranks on both hosts
    cut ...    the same, while one host is cut off for 15 s every 45 s: each cut is reported, no verdict changes

The hosts are network namespaces of this machine, which requires root and iproute2.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from equivtest.base import limits
from equivtest.ranks.first_cause import first_cause
from equivtest.ranks.hosts.run_hub import RunHub
from equivtest.ranks.hosts.secret import VARIABLE
from equivtest.ranks.pool import Pool
from studies.host_net import HERE, SECRET, Host, two_hosts
from studies.host_troubles import KINDS, Trouble, kill_torchrun, moment
from tests.programs.tiny import PlainCase

PORT = 29600
SLOTS = 4  # of each host
VISIT = "tests.programs.hosts:visit"
CASE = PlainCase(world_size=2 * SLOTS)
VISIT_S = 20.0  # for one visit of half a second, on a machine that does more
WORST_S = 250.0  # until ranks answer again: torchrun is started again, all slots start anew
CUT_EVERY_S, CUT_S = 45.0, 15.0
GONE_S = 30.0  # until nothing is left on a host


def start(hosts: list[Host], restarts: int = 100) -> None:
    for host in hosts:
        host.start(PORT, SLOTS, restarts)


def is_right(replies: list) -> bool:
    return [reply.outcome for reply in replies] == ["answered"] * CASE.world_size and all(
        reply.answers[0].tensors["output"].local.item() == CASE.world_size for reply in replies
    )


def endure(kind, number: int, hosts: list[Host], hub: RunHub, pool: Pool) -> tuple[Trouble, str, float]:
    """Causes one trouble.  Returns it, the message that names it, and the seconds until ranks answer as before."""
    chance = random.Random(number)
    before, host, done = len(hub.events()), chance.choice(hosts), []

    def act() -> None:
        moment(chance)
        trouble = kind(host, chance)
        done.append(trouble)
        time.sleep(trouble.lasts_s)
        trouble.undo()
        if kind is kill_torchrun:
            host.torchrun.wait(10)
            host.start(PORT, SLOTS, 100)
        done.append(trouble)

    thread = threading.Thread(target=act)
    thread.start()
    begun_s, told = time.monotonic(), []
    while True:
        replies = pool.run("", CASE, limit_s=VISIT_S)
        cause = first_cause(replies)
        if cause is not None:
            told.append(f"rank {cause.rank}: {cause.outcome}: {' '.join(cause.detail.split())}")
        told += pool.take_deaths()
        named = [line for line in hub.events()[before:] + told if done and all(word in line for word in done[0].words)]
        if is_right(replies) and len(done) == 2 and (named or time.monotonic() - begun_s > WORST_S):
            break
        if time.monotonic() - begun_s > 2 * WORST_S:
            break
    thread.join()
    seconds = time.monotonic() - begun_s
    if not named:
        print(*hub.events()[before:], *told, sep="\n    told: ", flush=True)
    return done[0], named[0] if named else "", seconds


def troubles(num: int, seed: int) -> int:
    order = [KINDS[index % len(KINDS)] for index in range(num)]
    random.Random(seed).shuffle(order)
    bad = 0
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as hosts:
        with RunHub((HERE, PORT), SECRET.encode()) as hub:
            start(hosts)
            print(hub.slots(), flush=True)
            with Pool(visit=VISIT, hub=hub.path) as pool:
                pool.run("", CASE)
                for number, kind in enumerate(order):
                    trouble, named, seconds = endure(kind, seed + number, hosts, hub, pool)
                    spare = [len(host.ranks()) for host in hosts]
                    is_bad = not named or seconds > WORST_S or max(spare) > SLOTS
                    bad += is_bad
                    print(f"{'!' * is_bad:1} {trouble.name:30} {seconds:6.1f} s  {named[:170]}", flush=True)
            for line in hub.events():
                print(f"    event: {line[:200]}")
        bad += left_on(hosts)
        print(f"{num} troubles, {bad} not as they should be")
    return int(bad > 0)


def left_on(hosts: list[Host], limit_s: float = GONE_S) -> int:
    """Counts the hosts on which something is left after `limit_s`, and prints after how long nothing was left."""
    begun_s, bad = time.monotonic(), 0
    for host in hosts:
        while (left := host.left()) and time.monotonic() - begun_s < limit_s:
            time.sleep(0.1)
        code = None if host.torchrun is None else host.torchrun.poll()
        print(f"  {host.address}: nothing left after {time.monotonic() - begun_s:.1f} s, torchrun's exit code {code}")
        if left:
            bad += 1
            print("  ! left:", *left, sep="\n    ")
    return bad


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "equivtest.cli", "run", "--listen", f"{HERE}:{PORT}", *arguments]


def run(arguments: list[str], *, cuts: bool = False) -> int:
    """Runs `equivtest run` with ranks on both hosts.  Returns its exit code, or 1 if something is left on the hosts."""
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as hosts:
        start(hosts)
        begun_s, num_cuts = time.monotonic(), 0
        process = subprocess.Popen(command(*arguments), env={**os.environ, VARIABLE: SECRET})
        while process.poll() is None:
            time.sleep(0.5)
            for host in hosts:
                host.processes()
            if cuts and time.monotonic() - begun_s > CUT_EVERY_S * (num_cuts + 1):
                host, num_cuts = hosts[num_cuts % 2], num_cuts + 1
                host.cut()
                time.sleep(CUT_S)
                host.mend()
        print(f"{num_cuts} cuts, exit code {process.returncode}")
        is_left = left_on(hosts, GONE_S + cuts * limits.RUN_S) > 0  # a host may be cut off at the end
        return process.returncode or int(is_left)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("troubles", "ends", "run", "cut"))
    parser.add_argument("--num", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    known, others = parser.parse_known_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the namespaces go with this process
    if known.what in ("run", "cut"):
        return run(others, cuts=known.what == "cut")
    if known.what == "ends":
        from studies.host_ends import ends

        return ends(others)
    return troubles(known.num, known.seed)


if __name__ == "__main__":
    sys.exit(main())
