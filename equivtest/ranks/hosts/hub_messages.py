"""What the hub of a run, the slots on its hosts and its pools say to each other: plain data, one struct per message.

A hub listens for slots; a slot is a process on a host, started by torchrun, that keeps a place for one rank of each
world; a pool asks the hub for worlds.
"""

from __future__ import annotations

import hashlib
import re
from importlib import metadata
from pathlib import Path

import msgspec

from equivtest.errors import Misuse
from equivtest.ranks.messages import Ready

PACKAGE = Path(__file__).parents[2]


class Config(msgspec.Struct, frozen=True):
    """Configures the server that a slot forks ranks from, see `equivtest.ranks.launch.Server`."""

    start: str
    imports: tuple[str, ...]
    preload: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]


# A connection's first message.


class SlotHello(msgspec.Struct, frozen=True, tag=True):
    """A slot, as torchrun numbers it.

    Attributes:
        rank, world_size: Its number among all slots, and how many there are.
        group_rank: Its host's number.
        host: Name of the machine.
        master: Where the first slot's host is reached by the others.
        identity: Of the code that runs there, see `identity`.
        restarts_left: How often torchrun starts it again.
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
    """The connection of a rank that is about to be forked."""

    token: str


# To a slot.


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The slot takes part."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """It does not."""

    reason: str


class Fork(msgspec.Struct, frozen=True, tag=True):
    """A rank of that number is wanted, which connects as `token` says."""

    token: str
    rank: int
    config: Config


class Kill(msgspec.Struct, frozen=True, tag=True):
    """A rank is to end at once."""

    token: str


class AskStacks(msgspec.Struct, frozen=True, tag=True):
    """A rank's Python stacks are wanted."""

    token: str


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life, which the slot returns.

    Attributes:
        hub_s, slot_s: time.monotonic() there when it was sent, and when it was returned.
    """

    hub_s: float
    slot_s: float = 0.0


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The slot is to end as one that failed, so that torchrun starts all anew."""


class Farewell(msgspec.Struct, frozen=True, tag=True):
    """The run is over."""


# From a slot, beside `Beat`.


class Forked(msgspec.Struct, frozen=True, tag=True):
    """A rank was forked.

    Attributes:
        scratch: Its directory there.
        environment: What is added to its environment.
    """

    token: str
    pid: int
    scratch: str
    environment: list[tuple[bytes, bytes]]
    ready: Ready


class NotForked(msgspec.Struct, frozen=True, tag=True):
    """It was not."""

    token: str
    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A rank has ended; what a pool reads when it has.

    Attributes:
        at_s: By the clock of who reads it.
        cut_off: See `equivtest.ranks.process.Ending`.
        output, stacks: The ends of what it printed, and of its stacks.
    """

    token: str
    code: int | None
    at_s: float
    output: str = ""
    stacks: str = ""
    cut_off: str = ""


class Stacks(msgspec.Struct, frozen=True, tag=True):
    """The stacks of ranks, by token."""

    of: dict[str, str]


# From a pool.


class AskWorld(msgspec.Struct, frozen=True, tag=True):
    """So many ranks are wanted; answered by as many `Rank`, or by `NoWorld`."""

    world_size: int
    config: Config


class KillRanks(msgspec.Struct, frozen=True, tag=True):
    tokens: list[str]


class AskStacksOf(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Stacks`."""

    tokens: list[str]


class AskCertainty(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Certain` once each rank's host was heard after this, or is lost."""

    tokens: list[str]


class AskSlots(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Slots` once all are there, or by `NoWorld`."""


class AskEvents(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Events`."""


# To a pool.


class Rank(msgspec.Struct, frozen=True, tag=True):
    """One of a world; comes with two descriptors: its connection, and what can be read once it has ended.

    Attributes:
        where: Its process and host, in words.
        offset_s: What is added to its clock to have this machine's.
        local_rank, local_world_size, group_rank: Among the world's ranks on its host, and which of the world's hosts.
        master: Where the host of rank 0 is reached by the others.
    """

    forked: Forked
    where: str
    offset_s: float
    local_rank: int
    local_world_size: int
    group_rank: int
    master: str


class NoWorld(msgspec.Struct, frozen=True, tag=True):
    """Why there is none.

    Attributes:
        kind: 'misuse', 'broken' or 'lost', which may be tried again.
    """

    kind: str
    reason: str


class Certain(msgspec.Struct, frozen=True, tag=True):
    """What is not lost is there."""


class Slots(msgspec.Struct, frozen=True, tag=True):
    """How many slots each host has, by its name."""

    of: dict[str, int]


class Events(msgspec.Struct, frozen=True, tag=True):
    """What was lost, refused or silent so far, a line each."""

    lines: list[str]


Hello = SlotHello | RankHello
ToSlot = Welcome | Refused | Fork | Kill | AskStacks | Beat | Leave | Farewell
FromSlot = Beat | Forked | NotForked | Ended | Stacks
FromPool = AskWorld | KillRanks | AskStacksOf | AskCertainty | AskSlots | AskEvents
ToPool = Rank | NoWorld | Stacks | Certain | Slots | Events

encode = msgspec.msgpack.Encoder().encode


def identity() -> str:
    """What must be alike on all hosts: the code of equivtest, and torch but for what it was built for."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return f"equivtest {digest.hexdigest()[:12]}, torch {metadata.version('torch').partition('+')[0]}"


def parse_address(text: str, option: str) -> tuple[str, int]:
    """Host and port of 'HOST:PORT', the host '' where it is left out.

    Raises:
        Misuse: it is something else.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host.isprintable() or not re.fullmatch(r"\d{1,5}", port) or int(port) >= 2**16:
        raise Misuse(f"{option}: expected HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)
