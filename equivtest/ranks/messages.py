"""Requests from the parent to a rank: plain data, one struct per request."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from equivtest.ranks.backend import Backend

START_ID = 0
"""Id of the reply that every rank sends without a request when it has joined the group."""


class Ready(msgspec.Struct, frozen=True):
    """First message of the server.

    Attributes:
        start: 'forkserver' or 'spawn': how it starts ranks.
        reason: Why the server cannot fork ranks, if start='auto' made the server try; else ''.
        problem: Why the server cannot start any rank, or ''.
    """

    start: str
    reason: str = ""
    problem: str = ""


class Start(msgspec.Struct, frozen=True, tag=True):
    """First message to a rank: the rank's number, and the parent's environment, import path and directory.

    Attributes:
        visit: 'package.module:function' to call at each `Visit`.
        scratch: Directory of this world, or of this rank on another host.
        environment, sys_path, directory: The parent's, as bytes since a name may be invalid text; on another host only
            the variables to add to the environment there.
        local_rank: Number among the world's ranks on its host, which chooses the device.
        store: Host and port of the store that connects ranks on several hosts; None if all are on the parent's host.
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
    """Request, before `Start`, to rank 0 of a world on several hosts: serve a store and answer its port.

    Attributes:
        host: Address at which the other ranks reach this one.
    """

    host: str


FAULTS = ("own operand", "another operand", "dropped", "poisoned", "doubled")
"""Faults of a collective, in this order.  Each rank takes its own operand for every rank's.  One rank passes another
rank's operand.  Nothing is sent and each rank receives its own operand.  Nothing is sent and each rank receives NaN or
-1.  Each operand counts twice."""


class Fault(msgspec.Struct, frozen=True):
    """Fault that an audit puts into one collective of a visit.

    Attributes:
        kind: One of FAULTS.
        index: Number of the collective among a rank's calls, from 0; -1 for none.
    """

    kind: str = FAULTS[0]
    index: int = -1


NO_FAULT = Fault()
BY_MESSAGE = "-"
"""Replaces the folder for ranks that share no files with their parent: they send their notes."""


class Visit(msgspec.Struct, frozen=True, tag=True):
    """Request to run `subject` on a case, in the form of `equivtest.cases.case.to_data`.

    Attributes:
        case_module: Module that defines the class of the case; imported first.
        fault: Fault in a world whose groups can spoil collectives, see `equivtest.ranks.observe.faults`.
        watch: Folder in which the ranks of such a world note what they compute and exchange, or BY_MESSAGE; '' for
            no notes.
    """

    id: int
    subject: str
    case_module: str
    case: dict[str, Any]
    fault: Fault = NO_FAULT
    watch: str = ""


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Request to add up `id` over all ranks, which shows whether they are at the same point."""

    id: int


class Support(msgspec.Struct, frozen=True, tag=True):
    """Request to try one of `equivtest.ranks.probe.PROBES` on a dtype."""

    id: int
    collective: str
    dtype: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Request to leave the group and end; a rank sends no reply."""


Request = Serve | Start | Visit | Probe | Support | Stop
Task = Visit | Probe | Support

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Request)


def encode_request(request: Request) -> bytes:
    return _encoder.encode(request)


def decode_request(message: bytes) -> Request:
    request: Request = _decoder.decode(message)
    return request


def import_path() -> list[str]:
    """Returns sys.path of this process with '' replaced by the current directory."""
    return [entry or os.getcwd() for entry in sys.path]


def interpreter_command(code: str) -> list[str]:
    """Returns the command that runs `code` in a new interpreter with this process's import path."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {import_path()!r}; {code}"]
