"""Defines the files of a bundle as structs, and the one form in which each struct is written.

To check a file, a reader converts its content back to that form.  A difference shows that equivtest did not write the
file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from equivtest.base.profiles import PROFILES, Profile
from equivtest.report.handover import Audited, Failure, KnownState, Record
from equivtest.report.tally import Tally

SCHEMA = 1
"""Version of a bundle's files.  Raise it if a reader of the old form would misread the new one."""

ENVIRONMENT, RESULTS, LISTS, MANIFEST = "environment.json", "results.json", "known_failures.json", "manifest.json"
SEARCHES = "searches"

T = TypeVar("T")
PACKAGE = Path(__file__).parents[1]


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The facts in environment.json that decide which cases a run has.  The file also has facts that only people read.

    Attributes:
        suite_digest: SHA-256 over the files of equivtest that made the bundle.
        levels: Lines on the levels of conformance. Empty unless the profile is `conformance`.
        manifest: Name of the manifest's file, or ''.
        hosts: Number of slots of each other host. None if the run listened for no hosts.
        declared: The declared arithmetic of the backend, by dtype. None if the run assumed the arithmetic that torch
            has on the CPU.
        failed: Number of tests that failed, including tests of known failures that no longer fail.
        complete, state: `complete` is True if the run came to its end. If it is False, `state` is the reason.
    """

    equivtest: str
    equivtest_commit: str
    suite_digest: str
    torch: str
    hypothesis: str
    cpu: str
    platform: str
    backend: str
    device: str
    imports: tuple[str, ...]
    arithmetic: str
    profile: str
    seeds: str
    world_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    subjects: tuple[str, ...]
    allow_unsupported: tuple[str, ...]
    known_failures: str
    audit: str
    complete: bool
    state: str
    started: str
    seconds: float
    failed: int = 0
    declared: dict[str, Any] | None = None
    hosts: Any = None
    manifest: str = ""
    levels: tuple[str, ...] = ()

    @property
    def is_limited(self) -> bool:
        """True if devices or slots limited the number of processes of the run."""
        return self.device != "cpu" or self.hosts is not None

    @property
    def plan(self) -> Profile:
        return PROFILES[self.profile]

    @property
    def own_lists(self) -> tuple[str, ...]:
        """File names of your lists of known failures."""
        return tuple(name for name in self.known_failures.split(", ") if name not in ("shipped", "none"))

    @property
    def uses_shipped_list(self) -> bool:
        return "shipped" in self.known_failures.split(", ")


class PropertyResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one property.  All fields except the failures' texts follow from the verdicts and the audit.

    Attributes:
        outcomes: Claim -> passed, failed, skipped (open) or xfailed (a known failure).
        counts: Claim -> kind of verdict -> number.
        searches: Label of a search -> number of records.
        covered: Numbers of judged, known, open and infeasible combinations.
        holes: Required cells without a conclusion.
        failures: The smallest failing cases that were found.
    """

    name: str
    subject: str
    outcomes: dict[str, str]
    counts: dict[str, dict[str, int]]
    searches: dict[str, int]
    covered: tuple[int, int, int, int]
    holes: tuple[str, ...]
    failures: tuple[Failure, ...]
    audit: Audited | None


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """The content of results.json.

    Attributes:
        troubles: Reasons, other than failing claims, why the run is red.
    """

    schema: int
    properties: tuple[PropertyResult, ...]
    known: tuple[KnownState, ...]
    troubles: tuple[str, ...]


class KnownList(msgspec.Struct, frozen=True):
    name: str
    entries: list[dict[str, Any]]


def result_of(
    tally: Tally, num_records: Mapping[str, int], audit: Audited | None, holes: Iterable[str]
) -> PropertyResult:
    sizes = [len(part) for part in (tally.covered.judged, tally.covered.known, tally.covered.open)]
    failures = (msgspec.structs.replace(failure, replay="") for failure in tally.failures)
    return PropertyResult(
        name=tally.listed.name,
        subject=tally.listed.subject,
        outcomes={result.claim: result.outcome for result in tally.claims()},
        counts={claim: dict(sorted(counts.items())) for claim, counts in sorted(tally.kinds.items())},
        searches=dict(sorted(num_records.items())),
        covered=(sizes[0], sizes[1], sizes[2], len(tally.covered.infeasible)),
        holes=tuple(holes),
        failures=tuple(sorted(failures, key=msgspec.json.encode)),
        audit=audit,
    )


def search_file(name: str, label: str) -> str:
    """Returns the path, below data/, of the file with the verdicts of one search of property `name`."""
    return f"{SEARCHES}/{name}/{label}.jsonl"


def write_records(records: Iterable[Record]) -> bytes:
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


def write_json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def read_records(data: bytes) -> list[Record]:
    """Reads a search's records.  Raises ValueError unless `write_records` would write the same lines."""
    records = [msgspec.json.decode(line, type=Record) for line in data.splitlines()]
    if write_records(records) != data:
        raise ValueError("its lines do not have the form that equivtest writes")
    return records


def read_json(data: bytes, kind: type[T]) -> T:
    """Reads a struct from a JSON file.  Raises ValueError unless `write_json` would write the same file."""
    value = msgspec.json.decode(data, type=kind)
    if write_json(value) != data:
        raise ValueError("it does not have the form that equivtest writes")
    return value


@cache
def suite_digest() -> str:
    """Returns a SHA-256 over all files of equivtest and its properties, equal for a checkout and its wheel."""
    digest = hashlib.sha256()
    for name, path in sorted(_suite_files()):
        digest.update(f"{name}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _suite_files() -> list[tuple[str, Path]]:
    inside = PACKAGE / "properties"
    properties = inside if inside.is_dir() else PACKAGE.parent / "properties"
    files = [(str(path.relative_to(PACKAGE)), path) for path in PACKAGE.rglob("*") if inside not in path.parents]
    files += [(f"properties/{path.relative_to(properties)}", path) for path in properties.rglob("*")]
    return [(name, path) for name, path in files if path.suffix in (".py", ".toml")]
