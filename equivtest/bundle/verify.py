"""Checks that a bundle is complete and unaltered, that this suite made the bundle, and that results fit verdicts.

Only JSON is read.  No module is imported and no code runs because a bundle names it.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from equivtest.base import limits
from equivtest.base.lacking import excused_by, parse_allowed
from equivtest.base.profiles import AUDIT_LABEL, PROFILES
from equivtest.bundle import contents
from equivtest.bundle.bag import Bag, read_bag
from equivtest.bundle.contents import Environment, KnownList, PropertyResult, Results
from equivtest.bundle.derive import derive, torchs_reasons
from equivtest.bundle.manifest import parse
from equivtest.cases.case import from_data, import_cases
from equivtest.errors import EquivtestError, Misuse, shorten
from equivtest.property import Property
from equivtest.report import levels
from equivtest.report.handover import (
    HOLDS_HERE,
    NO_LONGER,
    NOT_RUN,
    NOT_SUPPORTED,
    OPEN,
    OTHERWISE,
    STILL_FAILS,
    Audited,
    KnownState,
    Record,
    listed_of,
)
from equivtest.report.levels import Level, levels_of, required_of
from equivtest.report.tally import Tally
from equivtest.search.audited import unseen_in
from equivtest.search.chunks import Chunk, chunk_of
from equivtest.search.known import SHIPPED, KnownFailure, KnownFailures, entries_of, known_state, read_entries, today
from equivtest.search.planned import has_case, parts_of, pinned_sizes, profile_for
from equivtest.verdicts.verdict import FAILING

T = TypeVar("T")

MOST_NAMED = 5
"""Number of problems of one file that are printed.  Further problems are counted."""


@dataclass
class Verified:
    """The result of checking a bundle.

    Attributes:
        problems: One line for each problem. Empty if the bundle is complete, unaltered and green.
        notes: One line for each check that was made or left out.
        levels: Result on each level of conformance. Empty unless the run has the profile `conformance`.
    """

    digest: str
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environment: Environment | None = None
    known: KnownFailures = field(default_factory=KnownFailures)
    searches: list[tuple[Property, Chunk, list[Record]]] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)


def verify(path: Path, properties: Mapping[str, Property], pool: Any = None) -> Verified:
    """Checks a bundle against the suite that is installed on this machine.

    Args:
        properties: The shipped properties by name.
        pool: Pool of ranks. Some properties run ranks before their cases are drawn (`Property.resolve`). If the pool is
            None, the cases of these properties are not checked.

    Raises:
        Misuse: the file is no bundle, or another suite or release of torch made the bundle.
    """
    import_cases()
    bag = read_bag(path)
    found = Verified(bag.digest, [f"altered: {line}" for line in bag.altered])
    if found.problems:
        return found
    try:
        _Check(bag, properties, pool, found).run()
    except Misuse as error:
        raise Misuse(f"{shorten(str(path))}: {error}") from error
    return found


@dataclass
class _Check:
    bag: Bag
    properties: Mapping[str, Property]
    pool: Any
    found: Verified
    tallies: list[Tally] = field(default_factory=list)
    holes: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def run(self) -> None:
        data = self._read(contents.ENVIRONMENT, dict)
        results = self._read(contents.RESULTS, Results)
        lists = self._read(contents.LISTS, list[KnownList])
        if data is None or results is None or lists is None:
            return
        try:
            environment = msgspec.convert(data, Environment)
        except msgspec.ValidationError as error:
            self._say("altered", f"{contents.ENVIRONMENT}: {error}")
            return
        _require_suite(environment, results)
        self.found.environment = environment
        if not self._check_environment(environment, lists):
            return
        self.found.known = self._known(environment, lists)
        self._check_properties(environment, results)
        self._check_files(results)
        if environment.plan.requires_cells:
            self.found.levels = levels_of(self.tallies, required_of(self.properties), self.holes)
        lines = tuple(levels.in_lines(self.found.levels)) if self.found.levels else ()
        if lines != environment.levels:
            self._say(
                "altered",
                f"data/{contents.ENVIRONMENT} has the levels {environment.levels}, but the verdicts give {lines}",
            )
        if environment.failed and not self.found.problems:
            self._say(
                "red",
                f"{environment.failed} tests of the run failed, although every claim holds: see the state of the known "
                "failures in its report",
            )

    def _say(self, word: str, text: str) -> None:
        self.found.problems.append(f"{word}: {text}")

    def _read(self, name: str, kind: type[T]) -> T | None:
        """Reads a JSON file of the bundle, or notes a problem and returns None."""
        if name not in self.bag.payload:
            self._say("altered", f"data/{name} is missing")
            return None
        try:
            return contents.read_json(self.bag.payload[name], kind)
        except (ValueError, RecursionError) as error:
            self._say("altered", f"data/{name}: {shorten(str(error))}")
            return None

    def _check_environment(self, environment: Environment, lists: Sequence[KnownList]) -> bool:
        """Notes each invalid setting of the run.  Returns False if no cases can be derived from the settings."""
        is_planned = environment.profile in PROFILES and environment.plan.strength > 0
        if not is_planned or environment.seeds != "gate":
            self._say(
                "altered", f"data/{contents.ENVIRONMENT}: a bundle cannot have the profile {environment.profile!r}"
            )
            return False
        sizes = environment.world_sizes
        if list(sizes) != sorted(set(sizes)) or not set(sizes) <= set(range(1, limits.MAX_WORLD_SIZE + 1)) or not sizes:
            self._say("altered", f"data/{contents.ENVIRONMENT}: invalid world sizes {sizes}")
            return False
        if not environment.dtypes or not set(environment.dtypes) <= set(limits.DTYPES):
            self._say("altered", f"data/{contents.ENVIRONMENT}: invalid dtypes {environment.dtypes}")
            return False
        if not environment.complete:
            self._say("incomplete", f"the run did not end: {environment.state}")
        self._check_manifest(environment)
        if tuple(each.name for each in lists) != environment.own_lists:
            self._say(
                "altered", f"data/{contents.LISTS} names other lists of known failures than data/{contents.ENVIRONMENT}"
            )
        try:
            has_begun = day_of(environment.started) <= today()
        except ValueError:
            has_begun = False
        if not has_begun:
            self._say(
                "altered",
                f"data/{contents.ENVIRONMENT}: the run began at {shorten(environment.started)}, which is not a date, "
                "or after today",
            )
            return False
        unknown = set(environment.subjects) - {*self.properties, *(prop.subject for prop in self.properties.values())}
        if unknown:
            self._say("altered", f"data/{contents.ENVIRONMENT}: no property judges {', '.join(sorted(unknown))}")
        return True

    def _check_manifest(self, environment: Environment) -> None:
        if not environment.manifest and contents.MANIFEST not in self.bag.payload:
            return
        data = self._read(contents.MANIFEST, dict)
        if data is None:
            return
        try:
            options = parse(data).as_options(environment.manifest)
        except Misuse as error:
            self._say("altered", f"data/{contents.MANIFEST}: {error}")
            return
        used = {
            "backend": environment.backend,
            "device": environment.device,
            "import": list(environment.imports),
            "arithmetic": environment.arithmetic if environment.declared is not None else None,
            "dtypes": ",".join(environment.dtypes),
            "world_sizes": ",".join(map(str, environment.world_sizes)),
            "allow_unsupported": ",".join(sorted(environment.allow_unsupported)),
        }
        options["allow_unsupported"] = ",".join(sorted((options["allow_unsupported"] or "").split(",")))
        for name, value in used.items():
            if options[name] != value:
                text = f"{name} is {_short(options[name])} in the manifest, but {_short(value)} in the run"
                self._say("altered", f"data/{contents.MANIFEST}: {text}")

    def _known(self, environment: Environment, lists: Sequence[KnownList]) -> KnownFailures:
        """Returns the known failures that were valid when the run began, and notes each that has expired since then."""
        entries = read_entries(SHIPPED) if environment.uses_shipped_list else []
        for each in lists:
            numbers = Counter(entry.subject for entry in entries)
            try:
                entries += entries_of(each.entries, each.name, numbers)
            except EquivtestError as error:
                self._say("altered", f"data/{contents.LISTS}: {error}")
        for entry in entries:
            if entry.has_expired(today()):
                self._say("expired", f"the known failure {entry.id}, on {entry.expires}: {entry.reason}")
        return KnownFailures.on_day(entries, day_of(environment.started))

    def _check_properties(self, environment: Environment, results: Results) -> None:
        listed = {result.name: result for result in results.properties}
        wanted = {
            name: prop
            for name, prop in self.properties.items()
            if not environment.subjects or {name, prop.subject} & set(environment.subjects)
        }
        for name in listed.keys() - wanted.keys():
            self._say("altered", f"data/{contents.RESULTS} has property {name!r}, which the run does not have")
        if len(listed) != len(results.properties):
            names = [result.name for result in results.properties]
            twice = next(name for name in names if names.count(name) > 1)
            self._say("altered", f"data/{contents.RESULTS} has property {twice!r} twice")
        left_out = [name for name, prop in wanted.items() if name not in listed and prop.requires]
        if left_out:
            self.found.notes.append(f"the run left out these properties, as it may: {', '.join(left_out)}")
        for name, prop in wanted.items():
            if name in listed and prop.absent:
                self.found.notes.append(f"property {name} is not checked: {prop.absent}")
            elif name in listed:
                self._check_property(environment, name, prop, listed[name])
            elif name not in left_out:
                self._say("incomplete", f"property {name} is missing")
        self._check_known(environment, results, [prop for name, prop in wanted.items() if name in listed])
        self._check_troubles(results)

    def _check_property(self, environment: Environment, name: str, prop: Property, result: PropertyResult) -> None:
        sizes = prop.among(environment.world_sizes)
        is_limited = environment.is_limited
        pinned = pinned_sizes(prop, environment.plan, environment.world_sizes, is_limited=is_limited)
        parts = parts_of(prop, profile_for(prop, environment.plan, environment.subjects), sizes, pinned)
        audits = environment.audit == "on" and not prop.refuses_only and max(sizes, default=1) > 1
        labels = tuple(part.label for part in parts)
        planned = (*labels, AUDIT_LABEL) if audits else labels
        tally = Tally(listed_of(prop, path="", name=name, planned=planned, has_audit=audits))
        if prop.resolve is not None and self.pool is None:
            self.found.notes.append(
                f"the cases of {name} cannot be checked without ranks, which choose them: add --rerun N"
            )
        counts = {}
        for part in parts:
            records = self._records(name, part.label)
            if records is None:
                continue
            counts[part.label] = len(records)
            chunk = chunk_of(part, environment.dtypes, world_sizes=sizes, is_limited=is_limited)
            self._derive(name, prop, chunk, part.label, records, tally)
        self._check_audit(name, prop, result.audit, tally, wanted=audits)
        tally.failures += result.failures
        holes: tuple[str, ...] = ()
        if environment.plan.requires_cells and tally.is_complete:
            excused = excused_by(parse_allowed(environment.allow_unsupported), environment.backend)
            holes = tuple(tally.holes(environment.dtypes, excused))
        derived = contents.result_of(tally, counts, result.audit, holes)
        unknown = {"covered"} if prop.resolve is not None and self.pool is None else set()
        for key in dict.fromkeys(PropertyResult.__struct_fields__).keys() - unknown:
            if getattr(derived, key) != getattr(result, key):
                self._say(
                    "altered",
                    f"data/{contents.RESULTS}: {key} of {name} is {_short(getattr(result, key))}, "
                    f"but the verdicts give {_short(getattr(derived, key))}",
                )
        self._judge(name, tally, holes)
        self.tallies.append(tally)
        self.holes[name] = holes

    def _judge(self, name: str, tally: Tally, holes: Sequence[str]) -> None:
        for each in tally.claims():
            if each.outcome == "failed":
                self._say("red", f"{name}: {each.claim} does not hold")
            elif each.outcome == "skipped":
                self.found.notes.append(f"open: {name}: {each.claim}: {shorten(each.text)}")
        if holes:
            self._say("incomplete", f"{name}: {len(holes)} required cells have no conclusive verdict, first {holes[0]}")

    def _records(self, name: str, label: str) -> list[Record] | None:
        path = contents.search_file(name, label)
        if path not in self.bag.payload:
            self._say("incomplete", f"search {label} of {name} is missing: the bundle has no data/{path}")
            return None
        try:
            records = contents.read_records(self.bag.payload[path])
            for record in records:
                require_case(record)
            return records
        except (ValueError, RecursionError) as error:
            self._say("altered", f"data/{path}: {shorten(str(error))}")
            return None

    def _derive(self, name: str, prop: Property, chunk: Chunk, label: str, records: list[Record], tally: Tally) -> None:
        path = f"data/{contents.search_file(name, label)}"
        if prop.resolve is not None and self.pool is None:
            tally.add(label, records, ())
            return
        torchs = torchs_reasons(self.found.environment) if self.found.environment else frozenset[str]()
        derived, coverage, left_out, problems = derive(prop, chunk, self.found.known, records, self.pool, torchs)
        if torchs and (number := sum(not torchs.isdisjoint(record.known.values()) for record in records)):
            self.found.notes.append(
                f"{name}: {number} verdicts of search {label} blame torch, because the case failed on gloo and the CPU "
                "too: --rerun on gloo checks them"
            )
        if derived != records and not problems:
            problems = ["the verdicts are not in the order in which the search makes them, or one occurs twice"]
        for line in problems[:MOST_NAMED]:
            self._say("altered", f"{path}: {shorten(line)}")
        if len(problems) > MOST_NAMED:
            self._say("altered", f"{path}: {len(problems) - MOST_NAMED} more of this kind")
        tally.add(label, records, ())
        tally.left_out.update(left_out)
        if coverage is not None:
            tally.covered.add(coverage)
        self.found.searches.append((prop, chunk, records))

    def _check_audit(self, name: str, prop: Property, audit: Audited | None, tally: Tally, *, wanted: bool) -> None:
        if wanted != (audit is not None):
            audits = "an audit, which is missing" if wanted else "no audit, but the bundle has one"
            self._say("incomplete", f"{name}: the settings of the run ask for {audits}")
        if audit is None:
            return
        tally.done.add(AUDIT_LABEL)
        tally.unshown = audit.problem or ("not audited" if audit.waits else "")
        unseen, shows_nothing = unseen_in(audit)
        right = audit.property == name and audit.reason == prop.without_collectives
        if not right or audit.unseen != unseen or bool(audit.problem) < shows_nothing:
            self._say("altered", f"data/{contents.RESULTS}: the conclusion of the audit of {name} contradicts its rows")
        if tally.unshown:
            self._say("red", f"{name}: shows nothing: {shorten(tally.unshown)}")

    def _check_known(self, environment: Environment, results: Results, props: Iterable[Property]) -> None:
        wanted = {
            entry.id: entry
            for prop in props
            if not prop.absent
            for entry in self.found.known.of(prop.subject)
            if entry.claim in {claim.name for claim in prop.claims}
        }
        states = {state.id: state for state in results.known}
        if len(states) != len(results.known):
            ids = [state.id for state in results.known]
            twice = next(name for name in ids if ids.count(name) > 1)
            self._say("altered", f"data/{contents.RESULTS} has the known failure {shorten(twice)} twice")
        for name in states.keys() - wanted.keys():
            self._say(
                "altered", f"data/{contents.RESULTS} has the known failure {shorten(name)}, which the run does not have"
            )
        for name, entry in wanted.items():
            if name not in states:
                self._say("incomplete", f"the known failure {name} is missing: the run did not try if it still fails")
            else:
                self._check_state(environment, entry, states[name])

    def _check_state(self, environment: Environment, entry: KnownFailure, state: KnownState) -> None:
        if state != known_state(entry, state.state):
            self._say(
                "altered", f"data/{contents.RESULTS}: the known failure {entry.id} differs from its entry in the list"
            )
        is_limited = environment.is_limited
        runs = has_case(environment.world_sizes, environment.dtypes, entry.case, is_limited=is_limited)
        is_reference = (environment.backend, environment.device) == ("gloo", "cpu")
        possible = {STILL_FAILS, NOT_SUPPORTED, OPEN, OTHERWISE, NO_LONGER} if runs else {NOT_RUN}
        if runs and entry.is_shipped and not is_reference:
            possible = possible - {NO_LONGER} | {HOLDS_HERE}
        if state.state not in possible:
            self._say(
                "altered",
                f"data/{contents.RESULTS}: the known failure {entry.id} cannot have the state "
                f"{shorten(state.state)!r} in this run",
            )
        own = self.found.known.own
        is_own = any(own.match(entry.subject, entry.claim, entry.case, kind) for kind in FAILING)
        if state.state == NO_LONGER or (state.state == OTHERWISE and not (is_own and entry.is_shipped)):
            self._say("red", f"{entry.id} {state.state}")
        elif state.state in (OPEN, NOT_SUPPORTED):
            self.found.notes.append(f"open: {entry.id}: {state.state}")

    def _check_troubles(self, results: Results) -> None:
        for trouble in results.troubles:
            self._say("red", shorten(trouble))

    def _check_files(self, results: Results) -> None:
        known = {contents.ENVIRONMENT, contents.RESULTS, contents.LISTS, contents.MANIFEST}
        known |= {
            contents.search_file(result.name, label) for result in results.properties for label in result.searches
        }
        for name in self.bag.payload.keys() - known:
            self._say("altered", f"data/{shorten(name)} was added: the run has no such search")


def _require_suite(environment: Environment, results: Results) -> None:
    """Raises Misuse if another suite or release of torch, which would draw other cases, made the bundle."""
    if results.schema != contents.SCHEMA:
        raise Misuse(
            f"the bundle has schema {results.schema}, but this equivtest reads {contents.SCHEMA}: verify it with the "
            "release that wrote it"
        )
    if environment.suite_digest != contents.suite_digest():
        commit = f" (commit {environment.equivtest_commit})" if environment.equivtest_commit else ""
        raise Misuse(
            f"another suite made this bundle: equivtest {environment.equivtest}{commit}, digest "
            f"{environment.suite_digest[:12]}; installed is {metadata.version('equivtest')}, digest "
            f"{contents.suite_digest()[:12]}: verify it with the suite that made it"
        )
    for name in ("torch", "hypothesis"):
        wanted, here = getattr(environment, name), metadata.version(name)
        if wanted != here:
            raise Misuse(f"the bundle was made with {name} {wanted}, but {here} is installed: install {name} {wanted}")


def require_case(record: Record) -> None:
    """Raises ValueError unless the record has a valid case, and no negative margin or time."""
    try:
        from_data(record.case)
    except EquivtestError as error:
        raise ValueError(f"a line has no case: {error}") from error
    margins = (*record.margins.values(), *record.tensor_margins.values(), record.busy_s)
    if wrong := [margin for margin in margins if not margin >= 0]:
        raise ValueError(f"a line has a negative margin or time, {wrong[0]}")


def day_of(started: str) -> datetime.date:
    return datetime.date.fromisoformat(started[:10])


def _short(value: object) -> str:
    return shorten(msgspec.json.encode(value).decode())


def in_lines(path: Path, found: Verified) -> Iterator[str]:
    yield f"{path}: digest {found.digest}"
    if found.environment is not None:
        env = found.environment
        num_cases = len({contents_key(record) for *_, records in found.searches for record in records})
        yield (
            f"{path}: equivtest {env.equivtest}, torch {env.torch}, backend {env.backend} on {env.device}, profile "
            f"{env.profile}, {len(found.searches)} searches, {num_cases} cases derived again"
        )
    yield from (f"{path}: {line}" for line in levels.in_lines(found.levels) if found.levels)
    yield from (f"{path}: note: {note}" for note in found.notes)
    yield from (f"{path}: {problem}" for problem in found.problems)


def contents_key(record: Record) -> bytes:
    return msgspec.json.encode(record.case)
