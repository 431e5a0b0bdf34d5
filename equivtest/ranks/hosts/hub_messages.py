"""Messages between the hub of a run, the slots on its hosts and its pools. Each message is a struct of plain data.

A hub listens for slots. A slot is a process that torchrun starts on a host, and that reserves a place for one rank of
each world.  A pool requests worlds from the hub.  A token is the random name that the hub gives to a rank.
"""

from __future__ import annotations

import hashlib
import re
from importlib import metadata
from pathlib import Path

import msgspec

from equivtest.errors import Misuse
from equivtest.ranks.backend import Backend
from equivtest.ranks.messages import Ready

PACKAGE = Path(__file__).parents[2]


class Config(msgspec.Struct, frozen=True):
    """Configures the server from which a slot forks ranks: see `equivtest.ranks.launch.Server`."""

    backend: Backend
    preload: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]


# First message of a connection.


class SlotHello(msgspec.Struct, frozen=True, tag=True):
    """Introduces a slot, with torchrun's numbers.

    Attributes:
        rank, world_size: The slot's number among all slots, and the number of slots.
        group_rank: Number of the slot's host.
        host: Name of the machine.
        master: Address at which others reach the first slot's host.
        identity: Result of the function `identity` on the slot's host.
        restarts_left: Number of times that torchrun can still restart the slot.
    """

    rank: int
    world_size: int
    group_rank: int
    host: str
    pid: int
    master: str
    identity: str
    restarts_left: int = 0


class RankHello(msgspec.Struct, frozen=True, tag=True):
    """Introduces the connection of a rank. The slot opens this connection just before it forks the rank."""

    token: str


# To a slot.


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Tells a slot that the hub accepts it."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Tells a slot that the hub rejects it, and why."""

    reason: str


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Asks a slot to fork rank number `rank`.

    The slot first opens a connection for the rank, on which it sends a `RankHello` with this `token`.
    """

    token: str
    rank: int
    config: Config


class Kill(msgspec.Struct, frozen=True, tag=True):
    token: str


class AskStacks(msgspec.Struct, frozen=True, tag=True):
    """Asks a slot for a rank's Python stacks."""

    token: str


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Shows that the hub is alive. The slot returns this message.

    Attributes:
        hub_s, slot_s: `hub_s` is time.monotonic() of the hub when the hub sent the message. `slot_s` is
            time.monotonic() of the slot when the slot returned the message.
    """

    hub_s: float
    slot_s: float = 0.0


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Asks the slot to end as failed, so that torchrun restarts all slots."""


class Farewell(msgspec.Struct, frozen=True, tag=True):
    """Tells a slot that the run is over."""


# From a slot, besides `Beat`.


class Forked(msgspec.Struct, frozen=True, tag=True):
    """Reports that a slot has forked a rank.

    Attributes:
        scratch: Directory of the rank on its host.
        environment: Variables to add to the rank's environment.
        ready: First message of the server that forked the rank.
    """

    token: str
    pid: int
    scratch: str
    environment: list[tuple[bytes, bytes]]
    ready: Ready


class NotForked(msgspec.Struct, frozen=True, tag=True):
    token: str
    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Reports that a rank has ended. The pool reads this message from a pipe.

    Attributes:
        code: Exit code, which is negative for a signal. None if no process saw the exit.
        at_s: Time of the rank's end, by the clock of the process that reads the message.
        cut_off: What happened to the rank's host, if the host was lost. Otherwise ''.
        output, stacks: The last parts of the rank's output and of its stacks.
    """

    token: str
    code: int | None
    at_s: float
    output: str = ""
    stacks: str = ""
    cut_off: str = ""


class Stacks(msgspec.Struct, frozen=True, tag=True):
    """Answers `AskStacks` and `AskStacksOf` with the Python stacks of ranks, by token."""

    of: dict[str, str]


# From a pool.


class AskWorld(msgspec.Struct, frozen=True, tag=True):
    """Asks the hub for the ranks of a new world. The answer is one `Rank` for each rank, or `NoWorld`."""

    world_size: int
    config: Config


class KillRanks(msgspec.Struct, frozen=True, tag=True):
    tokens: list[str]


class AskStacksOf(msgspec.Struct, frozen=True, tag=True):
    """Asks the hub for the Python stacks of ranks. The answer is `Stacks`."""

    tokens: list[str]


class AskCertainty(msgspec.Struct, frozen=True, tag=True):
    """Asks the hub which hosts are still connected. The answer is `Certain`.

    The hub answers once each rank's host either has answered after this request or is lost.
    """

    tokens: list[str]


class AskSlots(msgspec.Struct, frozen=True, tag=True):
    """Asks the hub for the number of slots per host.

    The answer is `Slots` once all slots are connected, or `NoWorld`.
    """


class AskEvents(msgspec.Struct, frozen=True, tag=True):
    """Asks the hub which hosts were lost, refused or silent. The answer is `Events`."""


# To a pool.


class Rank(msgspec.Struct, frozen=True, tag=True):
    """One rank of a new world.

    Two descriptors come with the message. One is the rank's connection. The other is a pipe that is readable once the
    rank has ended.

    Attributes:
        where: Process and host of the rank, as text.
        offset_s: Seconds to add to the clock of the rank's host to get the clock of this machine.
        local_rank, local_world_size: Number of the rank among the world's ranks on its host, and the number of these
            ranks.
        group_rank: Number of the host in the world.
        master: Address at which others reach the host of rank 0.
    """

    forked: Forked
    where: str
    offset_s: float
    local_rank: int
    local_world_size: int
    group_rank: int
    master: str


class NoWorld(msgspec.Struct, frozen=True, tag=True):
    """Tells a pool that the hub cannot provide the requested ranks, and why.

    Attributes:
        kind: 'misuse', 'broken' or 'lost'. After 'lost' the pool may try again.
    """

    kind: str
    reason: str


class Certain(msgspec.Struct, frozen=True, tag=True):
    """Answers `AskCertainty` after every rank's host has answered or is lost."""


class Slots(msgspec.Struct, frozen=True, tag=True):
    """Answers `AskSlots` with the number of slots of each host, by the host's name."""

    of: dict[str, int]


class Events(msgspec.Struct, frozen=True, tag=True):
    """Answers `AskEvents` with one line for each slot that was lost, refused or silent so far."""

    lines: list[str]


Hello = SlotHello | RankHello
ToSlot = Welcome | Refused | Fork | Kill | AskStacks | Beat | Leave | Farewell
FromSlot = Beat | Forked | NotForked | Ended | Stacks
FromPool = AskWorld | KillRanks | AskStacksOf | AskCertainty | AskSlots | AskEvents
ToPool = Rank | NoWorld | Stacks | Certain | Slots | Events

encode = msgspec.msgpack.Encoder().encode


def identity() -> str:
    """Identifies the code of equivtest and the release of torch. Both must be equal on all hosts."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return f"equivtest {digest.hexdigest()[:12]}, torch {metadata.version('torch').partition('+')[0]}"


def parse_address(text: str, option: str) -> tuple[str, int]:
    """Splits 'HOST:PORT' into host and port. The host may be ''.

    Raises:
        Misuse: `text` has another form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host.isprintable() or not re.fullmatch(r"\d{1,5}", port) or int(port) >= 2**16:
        raise Misuse(f"{option}: expected HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)
