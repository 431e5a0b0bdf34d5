"""Repeats a search of a run without ranks, to find the cases that the search must have had, and their results.

The search itself chooses the cases: first the covering array, then further cases to fill cells.  Only the recorded
verdicts decide which cells need more cases, so the repeated search has the same cases as the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from equivtest.base import limits
from equivtest.bundle.contents import Environment
from equivtest.cases.case import Case, to_data
from equivtest.property import Property
from equivtest.report.handover import TORCHS, Coverage, Record
from equivtest.search.chunks import Chunk
from equivtest.search.known import KnownFailures
from equivtest.search.records import RECORD_SCHEMA
from equivtest.search.search import Searching, barred_records, rest_of, state_of
from equivtest.verdicts.claims import Claim
from equivtest.verdicts.compare import UNABLE
from equivtest.verdicts.verdict import FAILING, KINDS, OTHER_KINDS, WHOLE_RUN

Key = bytes
"""A case as sorted JSON."""


@dataclass
class Derived(Searching):
    """A search that takes the verdicts from a bundle's records, and lists every record that cannot be from such a run.

    Attributes:
        recorded: Case as JSON -> its records, for the cases that the search has not asked for yet.
        torchs: Result of `torchs_reasons`.
        problems: One line for each difference between the records and the search.
    """

    recorded: dict[Key, list[Record]] = field(default_factory=dict)
    torchs: frozenset[str] = frozenset()
    problems: list[str] = field(default_factory=list)

    def judge_cases(self, cases: Sequence[Case]) -> None:
        barred = {case: entry for case in cases if (entry := self.known.forbids_run(self.prop.subject, case))}
        self.states |= dict.fromkeys(barred, "known")
        for case, entry in barred.items():
            wanted = barred_records(self.prop.subject, case, entry)
            if self._take(case) != wanted:
                self.problems.append(
                    f"the known failure {entry.id} forbids to run {case!r}, but the bundle has a verdict of a run on it"
                )
            self.records += wanted
        left: list[Case] = []
        for case in cases:
            if case in barred:
                continue
            records = self._take(case)
            self.problems += [f"{problem} in {case!r}" for problem in self._faults(case, records)]
            self.seen[case] = {}
            kinds = [kind for record in records for kind in record.verdicts.values()]
            self.states[case] = state_of(kinds)
            left += rest_of(case, next((record.refused for record in records if record.refused), ()))
            self.records += records
            self.broken_runs += any(kind in WHOLE_RUN for kind in kinds)
            if self.broken_runs >= limits.BROKEN_RUNS:
                return
        if further := [case for case in dict.fromkeys(left) if case not in self.seen]:
            self.judge_cases(further)

    def _take(self, case: Case) -> list[Record]:
        records = self.recorded.pop(key_of(to_data(case)), [])
        if not records:
            self.problems.append(f"no verdict on {case!r}")
        return records

    def _faults(self, case: Case, records: Sequence[Record]) -> list[str]:
        """Returns one line for each field of a case's records that no run of the case can have written."""
        found = []
        for number, record in enumerate(records):
            place = (record.draw, record.mode, record.seed)
            if record.draw != number or number >= len(case.values) or place[1:] != case.values[number]:
                found.append(
                    f"the verdict on draw {record.draw} has mode {record.mode!r} and seed {record.seed}, but the case "
                    "has no such draw there"
                )
            if (record.schema, record.subject) != (RECORD_SCHEMA, self.prop.subject):
                found.append(
                    f"a verdict has subject {record.subject!r} and schema {record.schema}, but this search has "
                    f"{self.prop.subject!r} and {RECORD_SCHEMA}"
                )
            if (record.world_size, record.dtype, record.shard_kind, record.refusal) != _place_of(case):
                found.append("its world size, dtype, shard kind or refusal differs from the case's")
            found += self._faults_of_verdicts(case, record)
        has_ended = bool(records) and _ended(records[0])
        if records and not has_ended and not case.refusal and len(records) != len(case.values):
            found.append(f"only {len(records)} of the {len(case.values)} draws have verdicts")
        return found

    def _faults_of_verdicts(self, case: Case, record: Record) -> list[str]:
        found = []
        claims = {claim.name: claim for claim in self.prop.claims}
        for claim, kind in record.verdicts.items():
            if claim not in claims or kind not in (*KINDS, *OTHER_KINDS):
                found.append(f"claim {claim} has verdict {kind}, which is impossible for {self.prop.subject}")
                continue
            margin = record.margins.get(claim)
            if margin is None or not margin >= 0 or (kind == "holds" and margin > 1):
                found.append(f"claim {claim} has verdict {kind}, which contradicts its margin {margin}")
            if (kind == "known") != (claim in record.known):
                names = "no known failure" if kind == "known" else "a known failure"
                found.append(f"claim {claim} has verdict {kind}, but names {names}")
            elif kind == "known" and record.known[claim] not in {*self._reasons(case), *self.torchs}:
                found.append(f"claim {claim} has verdict known, but no entry of the known failures covers the case")
        if record.margins.keys() != record.verdicts.keys():
            found.append("the margins of a verdict name other claims than the verdict")
        if not _ended(record):
            found += [
                f"no verdict on claim {name}" for name in self._required(case, record.draw) - record.verdicts.keys()
            ]
        if set(record.verdicts.values()) <= {"holds"}:
            beyond = [name for name, margin in record.tensor_margins.items() if not 0 <= margin <= 1]
            found += [
                f"no claim fails, although the margin of {name} is {record.tensor_margins[name]}" for name in beyond
            ]
        return found

    def _reasons(self, case: Case) -> set[str]:
        return {entry.reason for entry in self.known.of(self.prop.subject) if entry.covers(case)}

    def _required(self, case: Case, draw: int) -> set[str]:
        """Returns the claims on which every run of the case has a verdict for this draw of values."""
        if draw >= len(case.values):
            return set()
        return {claim.name for claim in self.prop.claims if always_judges(claim) and claim.applies(case, draw)}


ENDED_KINDS = frozenset({*WHOLE_RUN, *UNABLE})


def torchs_reasons(environment: Environment) -> frozenset[str]:
    """Returns the reasons for which a run may call a failure known without an entry in a list of known failures.

    Each reason says that the case fails on gloo and the CPU too, so that torch is to blame and not the backend.  A run
    on gloo and the CPU has no such reason.
    """
    is_reference = (environment.backend, environment.device) == ("gloo", "cpu")
    return frozenset() if is_reference else frozenset(f"{TORCHS} ({kind})" for kind in FAILING)


def always_judges(claim: Claim) -> bool:
    """True if the claim has a verdict on every draw to which it applies: its `judge` never returns None."""
    return str(claim.judge.__annotations__["return"]) == "Judgement"


def derive(
    prop: Property,
    chunk: Chunk,
    known: KnownFailures,
    records: Iterable[Record],
    pool: Any = None,
    torchs: frozenset[str] = frozenset(),
) -> tuple[list[Record], Coverage | None, dict[str, str], list[str]]:
    """Repeats a search with the verdicts from `records` instead of from ranks.

    Returns:
        Four values: the records of the cases that the search chooses; the coverage of the search; each dtype that the
            search leaves out -> the reason; and one line for each difference between the records and a search.

    Args:
        torchs: Result of `torchs_reasons`.
        pool: Pool of ranks. Some properties run ranks before their cases are drawn (`Property.resolve`). For all other
            properties the pool may be None.
    """
    recorded: dict[Key, list[Record]] = {}
    for record in records:
        recorded.setdefault(key_of(record.case), []).append(record)
    searching = Derived(prop, chunk, pool, known, recorded=recorded, torchs=torchs)
    mistake = searching.run()
    problems = [mistake] if mistake else searching.problems
    problems += [
        f"there is a verdict on {_code(data)}, but this search has no such case" for data in searching.recorded
    ]
    return searching.records, searching.coverage(), dict(searching.left_out), problems


def key_of(data: object) -> Key:
    return msgspec.json.encode(data, order="sorted")


def _code(key: Key) -> str:
    return key.decode()[:200]


def _place_of(case: Case) -> tuple[int, str, str, str]:
    return case.world_size, case.dtype, case.shard_kind, case.refusal


def _ended(record: Record) -> bool:
    """True if the whole run of the case failed or could not be judged.

    The verdict of one claim on draw 0 then stands for all claims and draws.
    """
    ended = {f"{TORCHS} ({kind})" for kind in WHOLE_RUN}
    return not ENDED_KINDS.isdisjoint(record.verdicts.values()) or not ended.isdisjoint(record.known.values())
