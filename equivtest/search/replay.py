"""Writes, reads and runs replay files, by which another process runs a failing case again."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any

import msgspec
import torch

from equivtest.base import limits
from equivtest.base.files import write_whole
from equivtest.base.importing import suggestion
from equivtest.cases.case import from_data, to_data
from equivtest.errors import Misuse, reason_of, shorten
from equivtest.property import require_limit
from equivtest.ranks.backend import Backend
from equivtest.ranks.pool import Pool
from equivtest.verdicts.claims import CLAIMS
from equivtest.verdicts.judging import judge, require_conclusion
from equivtest.verdicts.message import write_message
from equivtest.verdicts.verdict import Verdict

SCHEMA_VERSION = 1


class ReplayFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a replay file.

    Attributes:
        schema: Version of this form.
        case: The case as `equivtest.cases.case.to_data` writes it.
        backend: Name and device of the backend, and the way in which its ranks are started.
    """

    schema: int
    subject: str
    claim: str
    kind: str
    case: dict[str, Any]
    limit_s: float
    backend: dict[str, Any]
    message: str
    versions: dict[str, str]


_KEYS = {"schema", "subject", "claim", "kind", "case", "backend"}


def write_replay(verdict: Verdict, backend: Backend, directory: Path) -> Path:
    """Writes the failure to a file in `directory`, and returns the file's path."""
    data = ReplayFile(
        schema=SCHEMA_VERSION,
        subject=verdict.subject,
        claim=verdict.claim,
        kind=verdict.kind,
        case=to_data(verdict.case),
        limit_s=verdict.limit_s,
        backend={
            "name": backend.name,
            "device": backend.device,
            "imports": list(backend.imports),
            "start": backend.start,
            "arithmetic": backend.arithmetic,
        },
        message=write_message(verdict),
        versions={"torch": str(torch.__version__), "python": platform.python_version()},
    )
    digest = hashlib.sha256(repr((verdict.claim, verdict.kind, verdict.case)).encode()).hexdigest()[:8]
    directory.mkdir(parents=True, exist_ok=True)
    name = verdict.subject.replace(":", ".").replace("/", ".")
    path = directory / f"{name}-{verdict.claim}-{verdict.kind}-{digest}.json"
    write_whole(path, msgspec.json.format(msgspec.json.encode(data), indent=2))
    return path


def read_replay(path: Path) -> dict[str, Any]:
    """Reads and checks a replay file.  Raises Misuse if it is unreadable, no replay file, or has a newer schema."""
    try:
        data = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Misuse(f"replay file {path} is broken: {error}") from error
    except (OSError, ValueError) as error:
        raise Misuse(f"replay file {shorten(str(path))} cannot be read: {reason_of(error)}") from error
    if not isinstance(data, dict) or not data.keys() >= _KEYS:
        raise Misuse(f"replay file {path} is broken: it needs the keys {', '.join(sorted(_KEYS))}")
    for key in ("subject", "claim"):
        if not isinstance(data[key], str):
            raise Misuse(f"replay file {path} is broken: {key} must be a text, got {data[key]!r}")
    if data["schema"] != SCHEMA_VERSION:
        raise Misuse(
            f"replay file {path} has schema {data['schema']}, this equivtest reads {SCHEMA_VERSION}: "
            "use the version that wrote it"
        )
    if data["claim"] not in CLAIMS:
        wanted = suggestion(data["claim"], list(CLAIMS))
        raise Misuse(f"replay file {path} has the unknown claim {data['claim']!r}; {wanted}")
    data.setdefault("limit_s", limits.CASE_S)  # files of earlier releases have none
    require_limit(data["limit_s"], f"replay file {path}: limit_s")
    return data


def backend_of(data: dict[str, Any]) -> Backend:
    """Returns the backend on which the case of a replay file failed.  Raises Misuse if the file names none."""
    try:
        return msgspec.convert(data["backend"], Backend)
    except msgspec.ValidationError as error:
        raise Misuse(f"the replay file's backend is broken: {error}") from error


def replay(data: dict[str, Any], pool: Pool, *, path: str = "") -> tuple[bool, str]:
    """Runs the case of a replay file again.  Returns (True if the claim still fails, a message).

    Raises:
        BrokenSetup, Misuse: the run shows neither that the claim fails nor that it holds.
    """
    case = from_data(data["case"])
    verdicts = judge(data["subject"], case, pool, [CLAIMS[data["claim"]]], limit_s=data["limit_s"])
    for verdict in verdicts:
        if verdict.failed:
            return True, write_message(verdict, replay=path)
    require_conclusion(data["subject"], case, verdicts, pool.faults_of(case))
    return False, f"{data['subject']}: {data['claim']} holds in {case!r}"
