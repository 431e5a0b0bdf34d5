"""Writes and reads the log of a run, from which the whole report can be made again.

Each line of the gzip file is a JSON object.  The first and the last line have the environment.  The lines between have
the properties of the session and the data of each item.  Every line is flushed at once, so a killed run leaves a
readable log.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from equivtest.errors import BrokenSetup, Misuse, reason_of, shorten
from equivtest.report.handover import Handover, Listed
from equivtest.report.results import Results
from equivtest.report.text import ENDED, headline

LOG = "run.jsonl.gz"
SCHEMA = 1
"""Version of the log's form, in `environment["schema"]`."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the log. Exactly one of its fields is set."""

    environment: dict[str, Any] | None = None
    properties: tuple[Listed, ...] | None = None
    handover: Handover | None = None


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The facts in `environment.json` that equivtest itself reads.  The file has further facts.

    Attributes:
        concluded: Number of tests that passed, failed, or are known failures, including tests of other plugins.
        excused: Names of the dtypes and collectives that the backend may lack in this run.
        failed: Number of tests that failed, including tests of other plugins.
        complete: True if the run and every planned search ended.
        state: BEGUN, ENDED, or the reason why the run ended early.
        process, started, seconds: Process id, beginning in UTC, and duration of the run.
        shard: The shard that the run judged, such as '2/4'. Absent if the run judged all properties.
    """

    schema: int
    backend: str
    torch: str
    profile: Literal["smoke", "gate", "soak", "conformance", "audit"]
    excused: tuple[str, ...]
    failed: int
    concluded: int
    complete: bool
    state: str
    process: int
    started: str
    seconds: float
    shard: Annotated[str, msgspec.Meta(pattern=r"^[1-9]\d{0,3}/[1-9]\d{0,3}$")] = "1/1"


class WrittenCase(msgspec.Struct, frozen=True):
    type: str
    fields: dict[str, Any]


class RunLog:
    def __init__(self, path: Path) -> None:
        self._file = gzip.open(path, "wb")  # noqa: SIM115  (it stays open until the run ends)

    def add(self, entry: Entry) -> None:
        """Appends a line and flushes the file, so that the line can be read even if this process is killed."""
        self._file.write(msgspec.json.encode(entry) + b"\n")
        self._file.flush(zlib.Z_SYNC_FLUSH)

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Run:
    """All data of a run, as read from its log.

    Attributes:
        path: Path of the report or log, as you named it.
    """

    path: Path
    environment: Mapping[str, Any]
    properties: tuple[Listed, ...]
    handovers: tuple[Handover, ...]

    @cached_property
    def results(self) -> Results:
        return results_of([self])


def results_of(runs: Iterable[Run]) -> Results:
    """Counts the results of several runs together.  No property may be in two of the runs."""
    results = Results()
    for run in runs:
        results.add_properties(run.properties)
        for handover in run.handovers:
            results.add(handover)
    return results


def read_run(path: Path) -> Run:
    """Reads a complete run from the folder of its report, or from its log alone.

    Raises:
        Misuse: there is no log, another version of equivtest wrote the log, the log is broken, or the run did not end.
    """
    run = read_begun(path)
    complete = run.environment["complete"] and run.environment["state"] == ENDED and run.results.are_complete
    if why := headline({**run.environment, "complete": complete}, run.results.ordered()):
        raise Misuse(f"{shorten(str(path))} is the report of an incomplete run: {why} Run it again to its end")
    return run


def read_begun(path: Path) -> Run:
    """Reads a run that may have been interrupted.  Raises Misuse if the log is missing, broken or of another schema."""
    log = path / LOG if os.path.isdir(path) else path  # which does not raise for a path that is too long
    lines = list(_lines(path, log))
    entries: list[Entry] = []
    try:
        _check_schema(path, lines)
        entries += [msgspec.json.decode(line, type=Entry) for line in lines]
        for entry in entries:
            if entry.environment is not None:
                msgspec.convert(entry.environment, Environment)
            if entry.handover is not None and entry.handover.searched is not None:
                for record in entry.handover.searched.records:
                    msgspec.convert(record.case, WrittenCase)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Misuse(f"{shorten(str(log))} is broken: {error}; write the report again") from error
    environments = [entry.environment for entry in entries if entry.environment is not None]
    return Run(
        path,
        environments[-1],
        tuple(listed for entry in entries for listed in entry.properties or ()),
        tuple(entry.handover for entry in entries if entry.handover is not None),
    )


def _check_schema(path: Path, lines: list[bytes]) -> None:
    first = msgspec.json.decode(lines[0]) if lines else None
    environment = first.get("environment") if isinstance(first, dict) else None
    schema = environment.get("schema") if isinstance(environment, dict) else None
    if schema != SCHEMA:
        raise Misuse(
            f"{shorten(str(path))} has a log of schema {schema!r}, this equivtest reads {SCHEMA}: "
            "use the release that wrote it for both reports"
        )


def _lines(path: Path, log: Path) -> Iterator[bytes]:
    """Yields the complete lines of a log.  A killed run may leave an incomplete last line."""
    try:
        with gzip.open(log) as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line
    except (EOFError, zlib.error):
        return
    except (OSError, ValueError) as error:
        why = "has no log" if isinstance(error, FileNotFoundError) else f"has no readable log: {reason_of(error)}"
        raise Misuse(
            f"{shorten(str(path))} {why}: name a folder that equivtest run --report has written, or its {LOG}"
        ) from error


def open_log(folder: Path) -> RunLog:
    try:
        return RunLog(folder / LOG)
    except OSError as error:
        raise BrokenSetup(f"cannot write {folder / LOG}: {error.strerror or error}") from error
