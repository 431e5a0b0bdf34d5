"""Causes troubles on ranks of other hosts, and says how messages must name them, for `studies.hosts`."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from studies.host_net import Host

T = TypeVar("T")
ANEW_S = 60.0  # for a process that an earlier trouble ended to be there again


@dataclass
class Trouble:
    """A trouble of a host.

    Attributes:
        words: Words that must all be in one line of the message.
        undo: Ends the trouble, after `lasts_s` seconds.
    """

    name: str
    words: list[str]
    lasts_s: float = 0.0
    undo: Callable[[], None] = field(default=lambda: None)


def one_of(chance: random.Random, look: Callable[[], list[T]]) -> T:
    until_s = time.monotonic() + ANEW_S
    while not (found := look()) and time.monotonic() < until_s:
        time.sleep(0.1)
    return chance.choice(found)


def kill_rank(host: Host, chance: random.Random) -> Trouble:
    victim = one_of(chance, host.ranks)
    host.kill(victim)
    return Trouble(f"rank {victim.pid} killed", ["killed by SIGKILL", f"process {victim.pid} on ", host.address])


def kill_slot(host: Host, chance: random.Random) -> Trouble:
    victim = one_of(chance, host.slots)
    host.kill(victim)
    return Trouble(f"slot {victim.pid} killed", [f"process {victim.pid} on ", host.address, "was lost"])


def kill_server(host: Host, chance: random.Random) -> Trouble:
    """Kills the server that forked a rank, the only process that could report how the rank ends."""
    rank = one_of(chance, host.ranks)
    victim = rank.parent()
    assert victim is not None
    host.kill(victim)
    return Trouble(f"server {victim.pid} killed", ["together with the server", f"process {rank.pid} on ", host.address])


def cut(host: Host, chance: random.Random) -> Trouble:
    host.cut()
    return Trouble("cut for 15 s", [host.address, "it was silent for 10 s"], 15.0, host.mend)


def delay(host: Host, chance: random.Random) -> Trouble:
    seconds = chance.uniform(4.5, 6.5)
    host.cut()
    return Trouble(f"cut for {seconds:.1f} s", [host.address, "was silent for"], seconds, host.mend)


def stop_slot(host: Host, chance: random.Random) -> Trouble:
    victim = one_of(chance, host.slots)
    host.kill(victim, signal.SIGSTOP)
    words = [f"process {victim.pid} on ", host.address, "was silent for"]
    return Trouble(f"slot {victim.pid} stopped for 5 s", words, 5.0, lambda: host.kill(victim, signal.SIGCONT))


def stop_slot_long(host: Host, chance: random.Random) -> Trouble:
    victim = one_of(chance, host.slots)
    host.kill(victim, signal.SIGSTOP)
    words = [f"process {victim.pid} on ", host.address, "it was silent for 10 s"]
    return Trouble(f"slot {victim.pid} stopped for 13 s", words, 13.0, lambda: host.kill(victim, signal.SIGCONT))


def stop_rank(host: Host, chance: random.Random) -> Trouble:
    victim = one_of(chance, host.ranks)
    host.kill(victim, signal.SIGSTOP)
    words = [f"process {victim.pid} on ", host.address]
    return Trouble(f"rank {victim.pid} stopped", words, 0.0)


def kill_torchrun(host: Host, chance: random.Random) -> Trouble:
    """Ends torchrun and its slots, and starts it again when the other torchrun has forgotten it.

    If it starts sooner, or if both torchruns share a store, their rendezvous fails after a minute (2.13.0).
    """
    assert host.torchrun is not None
    host.torchrun.kill()
    return Trouble("torchrun killed", ["was lost", host.address], 20.0)


KINDS = [kill_rank] * 4 + [kill_slot] * 3 + [kill_server] * 2 + [cut] * 4 + [delay] * 3
KINDS += [stop_slot, stop_slot_long, stop_rank, kill_torchrun]


def moment(chance: random.Random) -> None:
    time.sleep(chance.uniform(0.0, 1.5))
