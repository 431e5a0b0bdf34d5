"""Defines the requests that a parent process sends to a rank. Each request is a struct of plain data."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from equivtest.ranks.backend import Backend

START_ID = 0
"""Id of the reply that every rank sends without a request when it has joined the group."""


class Ready(msgspec.Struct, frozen=True):
    """First message that the server of the ranks sends to its parent.

    Attributes:
        start: How the server starts ranks: 'forkserver' or 'spawn'.
        reason: The reason why the server cannot fork ranks, if start='auto' made the server try. Otherwise ''.
        problem: The reason why the server cannot start any rank, or ''.
    """

    start: str
    reason: str = ""
    problem: str = ""


class Start(msgspec.Struct, frozen=True, tag=True):
    """First message to a rank, with its number and the parent's environment, import path and directory.

    Attributes:
        visit: 'package.module:function' that the rank calls at each `Visit`.
        scratch: Directory for the harness's files. All ranks on the parent's host share one directory. Each rank on
            another host has a directory of its own.
        environment, sys_path, directory: The parent's environment variables, sys.path and current directory, as bytes,
            because a name may be invalid text. A rank on another host gets only the variables to add to its
            environment.
        local_rank: Number of the rank among the ranks on its host. This number selects the rank's device.
        store: Host and port of the store that connects ranks on several hosts. None if all ranks are on the parent's
            host.
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
    """Asks rank 0 to serve a store and to answer with the store's port.

    This request is sent before `Start`, if ranks are on several hosts.

    Attributes:
        host: Address at which the other ranks reach rank 0.
    """

    host: str


FAULTS = ("own operand", "another operand", "dropped", "poisoned", "doubled")
"""Ways to spoil one collective.

own operand: each rank uses its own operand in place of every rank's. another operand: the first rank passes the second
rank's operand. dropped: nothing is sent, and each rank receives its own operand. poisoned: nothing is sent, and each
rank receives NaN or -1. doubled: each operand counts twice.
"""


class Fault(msgspec.Struct, frozen=True):
    """The fault that an audit plants in one collective of a run.

    Attributes:
        kind: One of FAULTS, such as 'dropped'.
        index: Number of the collective among a rank's calls, from 0. If -1, there is no fault.
    """

    kind: str = FAULTS[0]
    index: int = -1


NO_FAULT = Fault()
BY_MESSAGE = "-"
"""Value of `Visit.watch` for ranks that share no files with their parent: they send their notes to it."""


class Visit(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank to run `subject` on a case, which has the form of `equivtest.cases.case.to_data`.

    Attributes:
        case_module: Module that defines the class of the case. The rank imports this module first.
        fault: Fault to plant, if the rank's process groups can spoil collectives: see `equivtest.ranks.observe.faults`.
        watch: Folder in which the rank notes its operations and collectives, or BY_MESSAGE. If '', there are no notes.
    """

    id: int
    subject: str
    case_module: str
    case: dict[str, Any]
    fault: Fault = NO_FAULT
    watch: str = ""


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Asks all ranks to add up `id` in an all_reduce. The sum shows if all ranks answer the same request."""

    id: int


class Support(msgspec.Struct, frozen=True, tag=True):
    """Asks all ranks to try one collective, a key of `equivtest.ranks.probe.PROBES`, on tensors of a dtype."""

    id: int
    collective: str
    dtype: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank to leave the process group and end. The rank sends no reply."""


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
    return [entry or os.getcwd() for entry in sys.path]


def interpreter_command(code: str) -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.path[:] = {import_path()!r}; {code}"]
