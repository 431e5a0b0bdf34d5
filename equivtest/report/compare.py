"""Compares two runs: their claims, the combinations of values in their cases, their durations and their draws."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from equivtest.errors import Misuse, shorten
from equivtest.report.coverage import Combination, Covered
from equivtest.report.handover import NO_LONGER, BackendFault, Record
from equivtest.report.log import Run
from equivtest.report.tally import Tally, case_code
from equivtest.report.text import on_faults
from equivtest.verdicts.verdict import FAILING

SCHEMA = 1
SLOWER_RATIO, SLOWER_FLOOR_S = 1.5, 5.0
"""A property is slower if its time for common cases grew by more than this factor and these seconds."""

HOLDS, KNOWN, FAILS, OPEN = "holds", "known to fail", "fails", "open"
RANKS = {HOLDS: 0, KNOWN: 1, FAILS: 2}
"""Outcome of a claim -> rank.  A higher rank is worse."""
OUTCOMES = {"passed": HOLDS, "xfailed": KNOWN, "failed": FAILS, "skipped": OPEN}

CATEGORIES = ("worse", "no longer judged", "better", "newly judged", "slower", "different")
CAUSES = {"worse": ("worse", "no longer judged"), "slower": ("slower",), "different": CATEGORIES, "never": ()}
"""Name that --fail-on takes -> the categories of changes for which the exit code is then 1."""
NUM_SHOWN = 20  # lines of each category in the text

Key = tuple[str, str]
"""(name of a property, name of a claim)."""
Draw = tuple[bytes, int, str, int]
"""One set of values of a case: (case as JSON, number of the draw, its mode, its seed)."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One difference between the runs.

    Attributes:
        category: One of CATEGORIES.
        old, new: What the old run and the new run show, as text.
    """

    category: str
    property_name: str = msgspec.field(name="property")
    claim: str = ""
    old: str
    new: str
    number: int = 0
    example: str = ""

    @property
    def line(self) -> str:
        place = f"{self.property_name}: {self.claim}" if self.claim else self.property_name
        number = f" ({self.number:,})" if self.number else ""
        return f"{place}: {self.old} -> {self.new}{number}" + (f": {self.example}" if self.example else "")


class Judged(msgspec.Struct, frozen=True):
    claims: int
    combinations: int
    verdicts: int


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `equivtest compare`, as --json prints it.

    Attributes:
        schema: Version of this form.
        environments: Name -> (OLD's value, NEW's value) for each fact that differs between the runs' environments.
        failed_on: Categories of the changes for which the exit code is 1.
    """

    schema: int
    old: Judged
    new: Judged
    environments: dict[str, tuple[Any, Any]]
    changes: tuple[Change, ...]
    failed_on: tuple[str, ...]


@dataclass
class _Side:
    """The results of one of the two runs, arranged for the comparison.

    Attributes:
        verdicts: (property, claim) -> draw -> kind of the verdict.
        draws: Property -> draw -> its whole record except verdicts and durations.
        seconds: Property -> case -> the longest time that a rank spent on the case.
    """

    tallies: dict[str, Tally]
    outcomes: dict[Key, str] = field(default_factory=dict)
    verdicts: defaultdict[Key, dict[Draw, str]] = field(default_factory=lambda: defaultdict(dict))
    draws: defaultdict[str, dict[Draw, bytes]] = field(default_factory=lambda: defaultdict(dict))
    seconds: defaultdict[str, dict[bytes, float]] = field(default_factory=lambda: defaultdict(dict))

    def add(self, name: str, record: Record) -> None:
        case = msgspec.json.encode(record.case, order="deterministic")
        draw = (case, record.draw, record.mode, record.seed)
        for claim, kind in record.verdicts.items():
            self.verdicts[name, claim][draw] = _outcome_of(kind)
        alike = msgspec.structs.replace(record, busy_s=0.0, verdicts={})
        self.draws[name][draw] = msgspec.json.encode(alike, order="deterministic")
        self.seconds[name][case] = max(record.busy_s, self.seconds[name].get(case, 0.0))

    @property
    def num_failing(self) -> int:
        return sum(outcome == FAILS for outcome in self.outcomes.values())

    @property
    def judged(self) -> Judged:
        return Judged(
            sum(outcome in RANKS for outcome in self.outcomes.values()),
            sum(len(_combinations(tally.covered)) for tally in self.tallies.values()),
            sum(kind in RANKS for kinds in self.verdicts.values() for kind in kinds.values()),
        )


def parse_causes(text: str) -> tuple[str, ...]:
    """Returns the categories of changes for which the names in --fail-on stand.  Raises Misuse for an unknown name."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in CAUSES:
            raise Misuse(f"--fail-on: expected some of {', '.join(CAUSES)}, got {name!r}")
    return tuple(dict.fromkeys(category for name in names for category in CAUSES[name]))


def compare(old: Run, new: Run, causes: Collection[str] = CAUSES["worse"]) -> Comparison:
    sides = _side_of(old), _side_of(new)
    changes = sorted(
        [
            *_in_claims(*sides),
            *_in_combinations(*sides),
            *_in_seconds(*sides),
            *_in_draws(*sides),
            *_in_tests(old, new, sides),
        ],
        key=lambda change: (CATEGORIES.index(change.category), change.property_name, change.claim),
    )
    categories = {change.category for change in changes}
    return Comparison(
        schema=SCHEMA,
        old=sides[0].judged,
        new=sides[1].judged,
        environments=_differences(old.environment, new.environment),
        changes=tuple(changes),
        failed_on=tuple(category for category in CATEGORIES if category in categories and category in causes),
    )


def _in_tests(old: Run, new: Run, sides: tuple[_Side, _Side]) -> Iterator[Change]:
    """Yields a change if the number of failed tests differs, or if tests that are no claims fail for a new cause.

    A test may fail although no claim fails.  The cause is a fault of the backend, a known failure that no longer fails,
    or a required cell without a conclusion.
    """
    before, after = (run.environment["failed"] for run in (old, new))
    others = [max(0, failed - side.num_failing) for failed, side in zip((before, after), sides, strict=True)]
    causes, gone = _causes_only_in(new, old), _causes_only_in(old, new)
    states = f"{before:,} failed", f"{after:,}"
    if causes or after > before or others[1] > others[0]:
        yield _change("worse", ("all tests", ""), *states, 0, "; ".join(causes))
    elif after < before:
        yield _change("better", ("all tests", ""), *states, 0, f"before: {'; '.join(gone)}" if gone else "")


def _causes_only_in(run: Run, other: Run) -> list[str]:
    """Describes the causes of failed tests that `run` has and `other` lacks. Failing claims are left out."""
    known = set(map(_kind_of_fault, other.results.faults.values()))
    faults = [fault for fault in run.results.faults.values() if _kind_of_fault(fault) not in known]
    ids = [id_ for key, id_ in _corrected(run).items() if key not in _corrected(other)]
    return [*on_faults(faults), *[f"known failures that no longer fail: {', '.join(ids)}"] * bool(ids)]


def _kind_of_fault(fault: BackendFault) -> str:
    """Returns the part of a fault's text that is equal in all runs of the same backend.

    That is the collective, the dtype, the number of ranks and the kind of the fault.  The rest has values, ranks and
    cases.  For a rank that died between two visits the result is ''.
    """
    return fault.text.partition(": ")[0] if fault.collective else ""


def _corrected(run: Run) -> dict[tuple[str, str, str, str], str]:
    """Returns (subject, claim, kind, case) -> id of each known failure that no longer fails.

    The key does not contain the id, because ids differ by commit.
    """
    return {
        (each.id.rpartition("::")[0], each.claim, each.kind, each.case): each.id
        for each in run.results.ordered_known()
        if each.state == NO_LONGER
    }


OF_ONE_RUN = frozenset(
    {
        "command", "rootdir", "folder", "python_path", "process", "started", "seconds", "start", "hosts", "host_events",
        "state", "complete", "failed", "concluded",
    }
)  # fmt: skip
"""Facts that may differ between any two runs.  The comparison leaves them out."""


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = [name for name in dict.fromkeys([*old, *new]) if name not in OF_ONE_RUN]
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


def _side_of(run: Run) -> _Side:
    results = run.results
    names = Counter(tally.listed.name for tally in results.ordered())
    name_of = {
        tally.listed.id: tally.listed.name if names[tally.listed.name] == 1 else tally.listed.id
        for tally in results.ordered()
    }
    side = _Side({name_of[id_]: tally for id_, tally in results.tallies.items()})
    for name, tally in side.tallies.items():
        side.outcomes |= {(name, result.claim): OUTCOMES[result.outcome] for result in tally.claims()}
    for search in (handover.searched for handover in run.handovers if handover.searched):
        for record in search.records:
            side.add(name_of[search.listed.id], record)
    return side


def _outcome_of(kind: str) -> str:
    return FAILS if kind in FAILING else {"holds": HOLDS, "known": KNOWN}.get(kind, kind.replace("_", " "))


def _category(old: str, new: str) -> str:
    """Returns the category of a change of outcome, or '' if nothing changed."""
    if new == FAILS != old:
        return "worse"
    if old in RANKS and new in RANKS:
        return "worse" if RANKS[new] > RANKS[old] else "better" if RANKS[new] < RANKS[old] else ""
    return "no longer judged" if old in RANKS else "newly judged" if new in RANKS else ""


def _in_claims(old: _Side, new: _Side) -> Iterator[Change]:
    for key in dict.fromkeys([*old.outcomes, *new.outcomes]):
        before, after = old.outcomes.get(key, "absent"), new.outcomes.get(key, "absent")
        verdicts = [*_in_verdicts(key, old.verdicts[key], new.verdicts[key])]
        if category := _category(before, after):
            alike = next((change for change in verdicts if change.category == category), None)
            number, example = (alike.number, alike.example) if alike else (0, "")
            yield _change(category, key, before, after, number, example)
            verdicts = [change for change in verdicts if change.category != category]
        yield from verdicts


def _in_verdicts(key: Key, old: Mapping[Draw, str], new: Mapping[Draw, str]) -> Iterator[Change]:
    """Yields one change for each category in which verdicts changed, and one if the numbers of draws differ."""
    found: defaultdict[str, list[Draw]] = defaultdict(list)
    for draw in old.keys() & new.keys():
        found[_category(old[draw], new[draw])].append(draw)
    for category, draws in found.items():
        if category:
            first = min(draws)
            yield _change(category, key, old[first], new[first], len(draws), _code_of(first))
    numbers = [sum(kind in RANKS for kind in kinds.values()) for kinds in (old, new)]
    category = "no longer judged" if numbers[0] > numbers[1] else "newly judged"
    if all(numbers) and numbers[0] != numbers[1] and category not in found:
        before, after = (f"{number:,} verdicts" for number in numbers)
        yield _change(category, key, before, after)


def _in_combinations(old: _Side, new: _Side) -> Iterator[Change]:
    for name in old.tallies.keys() & new.tallies.keys():
        before, after = (_combinations(side.tallies[name].covered) for side in (old, new))
        for category, found in (("no longer judged", before - after), ("newly judged", after - before)):
            if found:
                states = (f"{len(before):,} pairs of values covered", f"{len(after):,}")
                yield _change(category, (name, ""), *states, len(found), _in_words(min(found)))


def _combinations(covered: Covered) -> set[Combination]:
    return covered.judged | covered.known


def _in_words(combination: Combination) -> str:
    return ", ".join(f"{axis}={value}" for axis, value in combination[1])


def _in_seconds(old: _Side, new: _Side) -> Iterator[Change]:
    for name in old.seconds.keys() & new.seconds.keys():
        cases = old.seconds[name].keys() & new.seconds[name].keys()
        before, after = (sum(side.seconds[name][case] for case in sorted(cases)) for side in (old, new))
        if after > before * SLOWER_RATIO and after - before > SLOWER_FLOOR_S:
            times = f"{after:.1f} s, {after / before:.1f} times as long" if before else f"{after:.1f} s"
            yield _change("slower", (name, ""), f"{before:.1f} s", times, len(cases))


def _in_draws(old: _Side, new: _Side) -> Iterator[Change]:
    """Yields at most two changes per property.

    The first change is about draws that only one run has. The second change is about draws that differ.

    Verdicts and durations are compared elsewhere.
    """
    for name in dict.fromkeys([*old.draws, *new.draws]):
        before, after = old.draws[name], new.draws[name]
        both = before.keys() & after.keys()
        if alone := (before.keys() ^ after.keys()):
            states = (f"{len(before):,} draws", f"{len(after):,}")
            yield _change("different", (name, ""), *states, len(alone), _code_of(min(alone)))
        if others := [draw for draw in both if before[draw] != after[draw]]:
            yield _change("different", (name, "margins"), "as recorded", "others", len(others), _code_of(min(others)))


def _code_of(draw: Draw) -> str:
    return f"{case_code(msgspec.json.decode(draw[0]))}, draw {draw[1]}"


def _change(category: str, key: Key, old: str, new: str, number: int = 0, example: str = "") -> Change:
    return Change(
        category=category, property_name=key[0], claim=key[1], old=old, new=new, number=number, example=example
    )


def in_words(comparison: Comparison) -> list[str]:
    lines = [f"{name}: {_short(old)} -> {_short(new)}" for name, (old, new) in comparison.environments.items()]
    for word in ("claims", "combinations", "verdicts"):
        old, new = getattr(comparison.old, word), getattr(comparison.new, word)
        lines.append(f"judged {word}: {old:,} -> {new:,}")
    for category in CATEGORIES:
        lines += _listed(category, [change for change in comparison.changes if change.category == category])
    counts = Counter(change.category for change in comparison.changes)
    what = ", ".join(f"{counts[category]} {category}" for category in CATEGORIES if counts[category])
    failed = f"; fails on {', '.join(comparison.failed_on)}" if comparison.failed_on else ""
    return [*lines, "", f"{what or 'no change'}{failed}"]


def _listed(category: str, changes: list[Change]) -> Iterable[str]:
    if not changes:
        return []
    left = len(changes) - NUM_SHOWN
    more = [f"  and {left} more, which --json lists"] if left > 0 else []
    return ["", f"{category}:", *(f"  {change.line}" for change in changes[:NUM_SHOWN]), *more]


def _short(value: Any) -> str:
    return shorten(str(value), 80)
