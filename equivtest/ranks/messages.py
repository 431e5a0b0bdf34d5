"""What the parent asks of a rank: plain data, one struct per request."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from equivtest.ranks.backend import Backend

START_ID = 0
"""The request that every rank answers without being asked: that it has joined the group."""


class Ready(msgspec.Struct, frozen=True):
    """The server's first word.

    Attributes:
        start: 'forkserver' or 'spawn': how it starts ranks.
        reason: Why it does not fork them though it was to see whether it can.
        problem: What keeps it from starting any, or ''.
    """

    start: str
    reason: str = ""
    problem: str = ""


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message to a rank: who it is, and the parent's surroundings.

    Attributes:
        visit: 'package.module:function' to call at each `Visit`.
        scratch: Directory of this world, or of this rank on another host.
        environment, sys_path, directory: The parent's, as bytes where a name may be no text; on another host only
            what is added to the environment there.
        local_rank: Number among the world's ranks on its host, which chooses the device.
        store: Host and port where the world's ranks on several hosts meet; None where all are on the parent's.
    """

    rank: int
    world_size: int
    backend: Backend
    visit: str
    scratch: str
    environment: list[tuple[bytes, bytes]]
    sys_path: list[bytes]
    directory: bytes
    local_rank: int = 0
    store: tuple[str, int] | None = None


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Before `Start`, to rank 0 of a world on several hosts: serve a store, and answer its port.

    Attributes:
        host: Under which the other ranks reach this one.
    """

    host: str


FAULTS = ("own operand", "another operand", "dropped", "poisoned", "doubled")
"""What can be done to a collective: each rank takes its own operand for that of every rank; one rank gives what another
one gives; nothing is sent, and what a rank gave is what it gets; nothing is sent, and what it gets is NaN or -1; each
operand counts twice."""


class Fault(msgspec.Struct, frozen=True):
    """What an audit does to one collective of a visit.

    Attributes:
        kind: One of FAULTS.
        index: Which of the collectives that a rank calls, from 0; -1 for none.
    """

    kind: str = FAULTS[0]
    index: int = -1


NO_FAULT = Fault()
BY_MESSAGE = "-"
"""Stands for the folder of ranks that share no files with their parent: they send what they note."""


class Visit(msgspec.Struct, frozen=True, tag=True):
    """Run `subject` on a case, written by `equivtest.cases.case.to_data`.

    Attributes:
        case_module: Defines the class of the case; imported first.
        fault: Of a world whose groups spoil collectives, see `equivtest.ranks.observe.faults`.
        watch: The folder in which such a world's ranks note what they compute and exchange, or BY_MESSAGE; '' where
            they do not.
    """

    id: int
    subject: str
    case_module: str
    case: dict[str, Any]
    fault: Fault = NO_FAULT
    watch: str = ""


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Add up `id` over all ranks: whether they are all at the same point."""

    id: int


class Support(msgspec.Struct, frozen=True, tag=True):
    """Try one of `equivtest.ranks.probe.PROBES` on a dtype."""

    id: int
    collective: str
    dtype: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave the group and end; not answered."""


Request = Serve | Start | Visit | Probe | Support | Stop
Task = Visit | Probe | Support

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Request)


def encode_request(request: Request) -> bytes:
    """`request` as a message."""
    return _encoder.encode(request)


def decode_request(message: bytes) -> Request:
    """The request that `encode_request` wrote."""
    request: Request = _decoder.decode(message)
    return request


def import_path() -> list[str]:
    """sys.path of this process, '' spelled out: it means another directory elsewhere."""
    return [entry or os.getcwd() for entry in sys.path]


def interpreter_command(code: str) -> list[str]:
    """Runs `code` in a new interpreter that imports from where this one does."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {import_path()!r}; {code}"]
