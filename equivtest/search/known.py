"""Reads lists of known failures from files."""

from __future__ import annotations

import dataclasses
import datetime
import operator
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from equivtest.base.importing import closest
from equivtest.cases.case import Case, defaults_of, fields_of, from_code
from equivtest.cases.names import SUBJECTS
from equivtest.errors import Misuse
from equivtest.report.handover import KnownState
from equivtest.verdicts.verdict import FAILING, WHOLE_RUN

if TYPE_CHECKING:
    from equivtest.ranks.support import Finding

KIND_OF_FAULT = {"wrong": "value", "raised": "raised", "hung": "timed_out", "died": "lost"}
"""Kind of a probe's failure -> kind of verdict on a case with the same collective alone."""

SHIPPED = Path(__file__).parents[1] / "known_failures.toml"

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, right: value in right,
    "contains": lambda value, right: right in value,
}


def asked(case: Case, name: str) -> Callable[[Case], Any] | None:
    """Returns the function that computes a named quantity of a case for conditions of `where`, or None if there is
    none.

    The name is a field or property of the case, or a predicate.  Predicates are the public functions of the module
    `known` in the package of the case's class, or in the packages of its base classes.
    """
    return _asked(case.__class__, name)  # type: ignore[arg-type]  # a class is hashable


@cache  # called for every condition of every entry on every case
def _asked(case_type: Any, name: str) -> Callable[[Case], Any] | None:
    of_class = getattr(case_type, name, None)
    if name in defaults_of(case_type):
        is_direct = name in {field.name for field in dataclasses.fields(case_type)}  # else it is a field of a part
        return operator.attrgetter(name) if is_direct else lambda each: fields_of(each)[name]
    if of_class is not None and not callable(of_class):
        return operator.attrgetter(name)
    packages = (each.__module__.rpartition(".")[0] for each in case_type.__mro__)
    return next((found[name] for package in packages if name in (found := _predicates(package))), None)


@cache
def _predicates(package: str) -> dict[str, Callable[[Case], Any]]:
    module = f"{package}.known"
    if not package.startswith("equivtest.") or not find_spec(module):
        return {}
    functions = vars(import_module(module)).items()
    public = ((name, each) for name, each in functions if not name.startswith("_"))
    return {name: each for name, each in public if isinstance(each, FunctionType) and each.__module__ == module}


@dataclass(frozen=True)
class Condition:
    """Compares a named quantity of the case with a literal or with another named quantity."""

    field: str
    op: str
    right: Any
    right_is_field: bool = False

    def holds(self, case: Case) -> bool:
        """True if `case` satisfies the condition.  If the case has no quantity of that name, the result is False.

        Raises:
            TypeError: the two sides cannot be compared.
        """
        left, right = asked(case, self.field), asked(case, self.right) if self.right_is_field else None
        if left is None or (self.right_is_field and right is None):
            return False
        return bool(OPERATORS[self.op](_plain(left(case)), _plain(right(case) if right else self.right)))


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """The fields that decide if an entry counts: versions of packages, and the day on which the entry expires."""

    versions: tuple[tuple[str, str], ...] = ()
    expires: datetime.date | None = None

    @cached_property
    def of_installed(self) -> bool:
        return all(_is_installed(name, specifier) for name, specifier in self.versions)

    def has_expired(self, day: datetime.date) -> bool:
        return self.expires is not None and day > self.expires


@dataclass(frozen=True)
class KnownFailure(_Entry):
    """One entry: `claim` on `subject` fails with `kind` on all cases that fulfil the conditions `where`.

    `number` counts the subject's entries from 1, file by file.  `findings` are numbers of files in findings/ of this
    repository.  The text `reason` ends with these numbers.
    """

    subject: str
    claim: str
    kind: str
    where: tuple[Condition, ...]
    case: Case
    reason: str
    link: str = ""
    number: int = 1
    is_shipped: bool = False
    findings: tuple[int, ...] = ()

    @property
    def id(self) -> str:
        return f"known_failures::{self.subject}::{self.number}"

    def covers(self, case: Case) -> bool:
        """True if all conditions hold for `case`.  Raises Misuse if a condition compares incomparable values."""
        try:
            return all(condition.holds(case) for condition in self.where)
        except TypeError as error:
            raise Misuse(f"{self.id}: where: {error}") from error


@dataclass(frozen=True)
class _Unread(_Entry):
    """An entry of the shipped list that is not read until its subject is judged."""

    raw: _Raw
    position: int
    number: int

    @property
    def subject(self) -> str:
        return self.raw.subject

    @cached_property
    def read(self) -> KnownFailure:
        with _naming(f"{SHIPPED}", self.position):
            return replace(_entry(self.raw, self.number, _known_claims()), is_shipped=True)


@dataclass(frozen=True)
class KnownFailures:
    """The entries of several files that are about installed versions of packages and have not expired.

    Attributes:
        listed: The entries. Some of them may not be read yet.
        expired: Entries about the installed versions that have expired.
    """

    listed: tuple[KnownFailure | _Unread, ...] = ()
    expired: tuple[KnownFailure, ...] = ()

    @classmethod
    def load(cls, *paths: Path) -> KnownFailures:
        """Returns the entries of files, as of today.  Raises Misuse, with entry and field, for a mistake in a file."""
        return cls.on_day(_listed(*paths), today())

    @classmethod
    def on_day(cls, entries: Iterable[KnownFailure | _Unread], day: datetime.date) -> KnownFailures:
        found = [entry for entry in entries if entry.of_installed]
        expired = tuple(_read(entry) for entry in found if entry.has_expired(day))
        return cls(tuple(entry for entry in found if not entry.has_expired(day)), expired)

    @cached_property
    def entries(self) -> tuple[KnownFailure, ...]:
        return tuple(map(_read, self.listed))

    @cached_property
    def own(self) -> KnownFailures:
        """The entries of your own lists."""
        own = (entry for entry in self.listed if isinstance(entry, KnownFailure) and not entry.is_shipped)
        return replace(self, listed=tuple(own))

    def of(self, subject: str) -> tuple[KnownFailure, ...]:
        if subject not in self._by_subject:
            self._by_subject[subject] = tuple(_read(entry) for entry in self.listed if entry.subject == subject)
        return self._by_subject[subject]

    @cached_property
    def _by_subject(self) -> dict[str, tuple[KnownFailure, ...]]:
        return {}

    def match(self, subject: str, claim: str, case: Case, kind: str | None = None) -> KnownFailure | None:
        """Returns the first entry that says that `claim` fails on `case`, or None.

        Args:
            kind: If None, entries of any kind of failure count.
        """
        found = (e for e in self.of(subject) if e.claim == claim or e.kind in WHOLE_RUN)
        return next((e for e in found if kind in (None, e.kind) and e.covers(case)), None)

    def of_fault(self, fault: Finding) -> KnownFailure | None:
        """Returns the entry of the subject `collectives` about a collective that a probe found wrong, or None."""
        code = f"CollectivesCase(world_size={fault.world_size}, dtype={fault.dtype!r}, collectives=({fault.name!r},))"
        try:
            case = from_code(code)
        except Misuse:  # a probe of a collective that the subject does not call
            return None
        return self.match("collectives", "equals_unsharded", case, KIND_OF_FAULT[fault.kind])

    def forbids_run(self, subject: str, case: Case) -> KnownFailure | None:
        """Returns the first entry whose kind of failure would end the whole run of `case`, or None."""
        return next((e for e in self.of(subject) if e.kind in WHOLE_RUN and e.covers(case)), None)


def known_state(entry: KnownFailure, state: str) -> KnownState:
    return KnownState(
        id=entry.id,
        claim=entry.claim,
        kind=entry.kind,
        case=repr(entry.case),
        reason=entry.reason,
        link=entry.link,
        state=state,
    )


def today() -> datetime.date:
    """Returns the date in UTC, so that entries expire everywhere at the same time."""
    return datetime.datetime.now(datetime.UTC).date()


def read_entries(*paths: Path) -> list[KnownFailure]:
    """Returns all entries of the files, also about versions that are not installed.  Raises Misuse as `load` does."""
    return list(map(_read, _listed(*paths)))


def _listed(*paths: Path) -> list[KnownFailure | _Unread]:
    """Returns all entries of the files.  Entries of the shipped list stay unread."""
    numbers: Counter[str] = Counter()
    return [entry for path in paths for entry in _entries_in(path, numbers)]


def _read(entry: KnownFailure | _Unread) -> KnownFailure:
    return entry.read if isinstance(entry, _Unread) else entry


def _entries_in(path: Path, numbers: Counter[str]) -> Sequence[KnownFailure | _Unread]:
    """Returns all entries of one file.  `numbers` has, for each subject, the number of entries in earlier files."""
    try:
        text = path.read_text("utf-8")
        if path == SHIPPED:
            return _behind(_shipped_entries(text), numbers)
        listed = _tables_of(path, text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise Misuse(f"known failures: cannot read {path}: {error}") from error
    return entries_of(listed, f"{path}", numbers)


def _behind(entries: Sequence[_Unread], numbers: Counter[str]) -> list[_Unread]:
    """Returns the entries with numbers that continue `numbers`, and counts them there."""
    found = [
        replace(entry, number=before + entry.number) if (before := numbers[entry.subject]) else entry
        for entry in entries
    ]
    numbers.update(entry.subject for entry in found)
    return found


def _tables_of(path: Path, text: str) -> list[object]:
    data = tomllib.loads(text)
    if "backend" in data:  # a manifest, see `equivtest.bundle.manifest`
        data = {"known_failure": data.get("waiver", [])}
    listed = data.pop("known_failure", [])
    if data or not isinstance(listed, list):
        raise Misuse(f"known failures: {path}: expected [[known_failure]] entries only, got {', '.join(data)}")
    return listed


@lru_cache(maxsize=2)
def _shipped_entries(text: str) -> tuple[_Unread, ...]:
    """Returns the entries of the shipped list.  Cached, because a process may read the long list many times."""
    numbers: Counter[str] = Counter()
    entries = []
    for position, raw in enumerate(msgspec.convert(_tables_of(SHIPPED, text), list[_Raw]), start=1):
        numbers[raw.subject] += 1
        versions = tuple(raw.versions.items())
        entries.append(_Unread(raw, position, numbers[raw.subject], versions=versions, expires=raw.expires))
    return tuple(entries)


def entries_of(listed: Sequence[object], name: str, numbers: Counter[str]) -> list[KnownFailure]:
    """Checks the parsed entries of a file, and returns them as `KnownFailure`s.

    Args:
        name: Name of the entries' file, for messages.
        numbers: Subject -> number of entries before the entries in `listed`.

    Raises:
        Misuse: an entry has a mistake.
    """
    claims = _known_claims() if listed else ()
    entries = []
    for position, data in enumerate(listed, start=1):
        with _naming(name, position):
            raw = msgspec.convert(data, _Raw)
            entries.append(_entry(raw, numbers[raw.subject] + 1, claims))
        numbers[raw.subject] += 1
    return entries


@contextmanager
def _naming(name: str, position: int) -> Iterator[None]:
    try:
        yield
    except (Misuse, msgspec.ValidationError) as error:
        raise Misuse(f"known failures: {name}: entry {position}: {error}") from error


class _Raw(msgspec.Struct, forbid_unknown_fields=True):
    subject: str
    claim: str
    kind: str
    where: list[tuple[str, str, Any]]
    case: str
    reason: str
    link: str = ""
    versions: dict[str, str] = {}
    findings: list[int] = []
    expires: datetime.date | None = None


def _entry(raw: _Raw, number: int, claims: Collection[str]) -> KnownFailure:
    for name in ("subject", "claim", "reason"):
        if not getattr(raw, name).strip():
            raise Misuse(f"{name}: must not be empty")
    is_known = ":" in raw.subject or raw.subject in SUBJECTS
    if not is_known and (close := closest(raw.subject, SUBJECTS, likeness=0.8)):
        raise Misuse(f"subject: no subject is called {raw.subject!r}; did you mean {close!r}?")
    if raw.claim not in claims:
        raise Misuse(f"claim: must be one of {', '.join(claims)}, got {raw.claim!r}")
    if raw.kind not in FAILING:
        raise Misuse(f"kind: must be one of {', '.join(FAILING)}, got {raw.kind!r}")
    for name, specifier in raw.versions.items():
        if not name.strip():
            raise Misuse("versions: the name of a package must not be empty")
        try:
            SpecifierSet(specifier)
        except InvalidSpecifier as error:
            raise Misuse(f"versions: {name}: {error}") from error
    try:
        case = from_code(raw.case)
    except Misuse as error:
        raise Misuse(f"case: {error}") from error
    where = tuple(_condition(row, case) for row in raw.where)
    entry = KnownFailure(
        raw.subject, raw.claim, raw.kind, where, case, _reason(raw), raw.link, number, findings=tuple(raw.findings),
        versions=tuple(raw.versions.items()), expires=raw.expires,
    )  # fmt: skip
    if not entry.covers(case):
        raise Misuse("where: the condition is false for the entry's own case")
    return entry


def _reason(raw: _Raw) -> str:
    numbers = " and ".join(map(str, raw.findings))
    return f"{raw.reason} (finding{'s' * (len(raw.findings) > 1)} {numbers})" if numbers else raw.reason


def _condition(row: tuple[str, str, Any], case: Case) -> Condition:
    name, op, right = row
    if op not in OPERATORS:
        raise Misuse(f"where: operator must be one of {' '.join(OPERATORS)}, got {op!r}")
    _check_field(name, case)
    if not isinstance(right, dict):
        return Condition(name, op, right)
    if right.keys() != {"field"}:
        raise Misuse(f"where: right side must be a literal or {{field = 'NAME'}}, got {right!r}")
    _check_field(right["field"], case)
    return Condition(name, op, right["field"], right_is_field=True)


def _check_field(name: object, case: Case) -> None:
    if not isinstance(name, str) or name.startswith("_") or not asked(case, name):
        raise Misuse(f"where: {type(case).__name__} has no field, property or predicate {name!r}")


def _plain(value: Any) -> Any:
    """Converts tuples to lists, so that a tuple in the case equals a list in the file."""
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _is_installed(name: str, specifier: str) -> bool:
    version = _installed_version(name)
    return bool(version) and SpecifierSet(specifier).contains(version, prereleases=True)


@cache
def _installed_version(name: str) -> str:
    """Returns the installed version of a package, or ''.  Cached, because a call reads a lot of metadata."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _known_claims() -> tuple[str, ...]:
    """Returns the name of every claim.  Only a file with entries needs the names, because claims import torch."""
    from equivtest.verdicts.claims import CLAIMS

    return tuple(CLAIMS)
