"""Counts the verdicts of a run, separately for each property, as each search ends."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from equivtest.base.lacking import is_allowed
from equivtest.base.profiles import ANY, AUDIT_LABEL, wanted_kinds
from equivtest.report.coverage import Covered
from equivtest.report.handover import TORCHS, Failure, Listed, Record
from equivtest.report.margins import Key, Margins
from equivtest.report.parts import PartTree
from equivtest.verdicts.verdict import CONCLUSIVE, FAILING

Cell = tuple[int, str, str]
"""(world size, dtype, shard kind) of a case.  The shard kind is 'any' for a property of refusals."""

NUM_SLOWEST = 3  # cases that each property keeps


@dataclass(frozen=True)
class ClaimResult:
    """The outcome of one claim of a property over the whole run.

    Attributes:
        outcome: It is 'xfailed' if every verdict is a known failure, and 'skipped' if the claim is open.
        text: Full messages of the failures, or the reason why there is no conclusion.
        torchs: One line for each kind of failure that gloo on the CPU shows too.
    """

    claim: str
    outcome: Literal["passed", "failed", "skipped", "xfailed"]
    text: str = ""
    torchs: str = ""


@dataclass
class Tally:
    """The counts of one property.

    Attributes:
        done: Labels of the planned searches that have ended.
        layouts: Number of cases. A case of two searches counts twice.
        kinds: Claim -> number of verdicts of each kind.
        claim_cells: (cell, claim, family of modes) -> number of verdicts of each kind.
        cells: Cell -> number of verdicts of each kind, on all claims together. If a claim judges only some visits, such
            as the claim on collectives, it need not have verdicts in every cell.
        margins: (tensor, dtype) -> margins of the draws judged by a bound.
        parts: Conclusions on each submodule of modules that are judged by parts.
        factors: Tensor -> factor between the ranks' gradient and the unsharded gradient. The program's backward applies
            the factor, and the program divides the factor out again later.
        torchs: (claim, reason) -> cases, as code, that fail on gloo and the CPU too -> number of draws.
        lacking: (cell, reason, 'dtype:function' of each refused collective) -> number of verdicts that stay open for
            that reason.
        declined: Reason why the program does not support a case -> number of cases.
        slowest: (seconds, code of the case) of the slowest cases, the slowest first.
        cut: Number of cases that were left out because the time budget was over.
        unbegun: Number of searches that had not begun when the time budget was over.
        left_out: Dtype in which no case of the property can be judged -> the reason, or ''.
        unshown: The reason, from the property's audit, why claims that hold show nothing. Otherwise ''.
    """

    listed: Listed
    done: set[str] = field(default_factory=set)
    layouts: int = 0
    draws: int = 0
    refused: int = 0
    world_sizes: Counter[int] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    shard_kinds: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    kinds: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    cells: defaultdict[Cell, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    claim_cells: defaultdict[tuple[Cell, str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    margins: defaultdict[Key, Margins] = field(default_factory=lambda: defaultdict(Margins))
    parts: PartTree = field(default_factory=PartTree)
    factors: dict[str, float] = field(default_factory=dict)
    reasons: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    torchs: defaultdict[tuple[str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    lacking: Counter[tuple[Cell, str, tuple[str, ...]]] = field(default_factory=Counter)
    declined: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    slowest: list[tuple[float, str]] = field(default_factory=list)
    cut: int = 0
    unbegun: int = 0
    covered: Covered = field(default_factory=Covered)
    left_out: dict[str, str] = field(default_factory=dict)
    unshown: str = ""

    @property
    def is_complete(self) -> bool:
        return bool(self.listed.planned) and self.done >= set(self.listed.planned)

    @property
    def num_ended(self) -> int:
        return len(self.done & set(self.listed.planned))

    @property
    def lacks_audit(self) -> bool:
        """True if the run audits the property, but your selection of tests leaves the audit out."""
        return self.listed.has_audit and bool(self.listed.planned) and AUDIT_LABEL not in self.listed.planned

    @property
    def refuses_only(self) -> bool:
        """True if the property claims only that cases outside the contract are refused."""
        return self.listed.claims == ("refuses",)

    def add(
        self,
        label: str,
        records: Iterable[Record],
        failures: Iterable[Failure],
        *,
        ended: bool = True,
    ) -> None:
        """Adds the verdicts of one search, and its failures except failures of cases that failed alike before."""
        self.done |= {label} if ended else set()
        shown = {(each.claim, each.kind, each.case) for each in self.failures}
        self.failures += [each for each in failures if (each.claim, each.kind, each.case) not in shown]
        busy_s: dict[str, float] = {}
        for record in records:
            key = json.dumps(record.case)
            if key not in busy_s:
                self.layouts += 1
                self.world_sizes[record.world_size] += 1
                self.dtypes[record.dtype] += 1
                self.shard_kinds[record.shard_kind] += 1
            busy_s[key] = max(busy_s.get(key, 0.0), record.busy_s)
            self._add_verdicts(record)
        cases = [(seconds, case_code(json.loads(key))) for key, seconds in busy_s.items()]
        self.slowest = sorted([*self.slowest, *cases], reverse=True)[:NUM_SLOWEST]

    def _add_verdicts(self, record: Record) -> None:
        self.draws += 1
        self.modes[record.mode] += 1
        cell = (record.world_size, record.dtype, ANY if self.refuses_only else record.shard_kind)
        for claim, kind in record.verdicts.items():
            self.kinds[claim][kind] += 1
            self.cells[cell][kind] += 1
            self.claim_cells[cell, claim, family_of(record.mode)][kind] += 1
            if kind == "declined":
                self.declined[" ".join((record.declined or "").split())] += 1
            if kind == "not_supported":
                self.lacking[cell, record.lacking or "", record.refused or ()] += 1
        for tensor, margin in record.tensor_margins.items():
            self.margins[of_any_step(tensor), record.dtype].add(margin)
        self.parts.add(record.parts, record.begins)
        self.factors |= record.factors
        for claim, reason in record.known.items():
            self.reasons[claim][reason] += 1
            if reason.startswith(TORCHS):
                self.torchs[claim, reason][case_code(record.case)] += 1
        self.refused += record.verdicts.get("refuses") == "holds"

    def total(self, *kinds: str) -> int:
        return sum(n for counts in self.kinds.values() for kind, n in counts.items() if not kinds or kind in kinds)

    @property
    def none_supported(self) -> str:
        """The reason why a green run shows nothing about this property, or ''.

        The run shows nothing if the program declines cases on several ranks and no claim has a conclusion on such a
        case.
        """
        several = sum((counts for (size, *_), counts in self.cells.items() if size > 1), Counter[str]())
        if not several["declined"] or any(several[kind] for kind in (*CONCLUSIVE, "known")):
            return ""
        what = "the program supports no case on several ranks that was tried"
        if several.keys() != {"declined"}:
            what = f"on several ranks no verdict is conclusive ({describe(several)}); the program declined cases"
        return (
            f"{self.listed.name}: {what}: {self.why_declined}: draw cases that it supports, such as by "
            "world_sizes=, inputs= or sizes="
        )

    @property
    def why_declined(self) -> str:
        reason, count = self.declined.most_common(1)[0]
        others = len(self.declined) - 1
        return f"{reason} ({count:,})" + (f", and {others:,} other reason{'s' * (others > 1)}" if others else "")

    def left_out_in_words(self) -> list[str]:
        """Returns a line for each dtype in which no case can be judged, or none on some numbers of ranks."""
        return [
            f"left out {dtype}{' on some numbers of ranks' * (dtype in self.dtypes)}: "
            f"{why or 'no case can be judged there'}"
            for dtype, why in sorted(self.left_out.items())
        ]

    def torchs_in_words(self, only: str = "") -> list[str]:
        """Returns a line, with the shortest case, for each claim and kind of failure that gloo on the CPU shows too."""
        return [
            f"{self.listed.name}: {claim} {reason}: {cases.total():,} verdicts, such as in {min(cases, key=len)}"
            for (claim, reason), cases in sorted(self.torchs.items())
            if only in ("", claim)
        ]

    @property
    def judged(self) -> int:
        return self.total(*CONCLUSIVE, "inconclusive")

    @property
    def has_failed(self) -> bool:
        return any(result.outcome == "failed" for result in self.claims())

    def claims(self) -> list[ClaimResult]:
        names = dict.fromkeys([*self.listed.claims, *self.kinds])
        return [replace(self._claim(name), torchs="\n".join(self.torchs_in_words(name))) for name in names]

    def _claim(self, name: str) -> ClaimResult:
        counts = self.kinds.get(name, Counter())
        failures = [failure.message for failure in self.failures if failure.claim == name]
        if failures or counts.keys() & FAILING:
            text = "\n\n".join(failures) or f"{name} does not hold: {describe(counts)}"
            return ClaimResult(name, "failed", text)
        if not self.is_complete:
            searches = f"{self.num_ended} of {len(self.listed.planned)} searches"
            return ClaimResult(name, "skipped", f"not finished: {searches} ended")
        if not counts:
            is_cause = self.left_out and not self.layouts
            where = f", since none can be judged in {', '.join(sorted(self.left_out))}" if is_cause else ""
            return ClaimResult(name, "skipped", f"not run: no case was judged{where}")
        if counts["holds"] and (why := self.unshown or self.none_supported):
            return ClaimResult(name, "skipped", f"shows nothing: {why}")
        if counts["holds"]:
            return ClaimResult(name, "passed")
        if counts.keys() == {"known"}:
            return ClaimResult(name, "xfailed", "; ".join(self.reasons[name]))
        return ClaimResult(name, "skipped", f"no conclusive verdict: {describe(counts)}")

    def kinds_of_cells(self, world_size: int, conclusive: Collection[str] = ()) -> tuple[str, ...]:
        """Returns the shard kinds of cases on `world_size` ranks, without kinds that a non-empty `conclusive` lacks."""
        return wanted_kinds(world_size, refusals=self.refuses_only, shards=self.listed.shards, conclusive=conclusive)

    def required_cells(self, dtypes: Iterable[str]) -> list[Cell]:
        """Returns the cells (world size, dtype, shard kind) in which a conformance run needs conclusive verdicts."""
        if not self.listed.requires_cells:
            return []
        searches = [label for label in self.listed.planned if label.startswith("w")]
        sizes = sorted({int(label.partition("-")[0].removeprefix("w")) for label in searches})
        return [
            (size, dtype, kind)
            for size in sizes
            for dtype in dtypes
            if dtype in (self.listed.conclusive_dtypes or (dtype,))
            for kind in self.kinds_of_cells(size, self.listed.conclusive_shards)
        ]

    def not_allowed(self, allowed: Collection[str]) -> Counter[tuple[Cell, str, tuple[str, ...]]]:
        return Counter({key: count for key, count in self.lacking.items() if not is_allowed(key[2], allowed)})

    def holes(self, dtypes: Iterable[str], allowed: Collection[str] = ()) -> list[str]:
        """Returns one line for each required cell without a conclusion.

        A cell lacks a conclusion if it has no verdict, or more open than conclusive verdicts.  A claim also gets a line
        if it is mostly open in a cell on one family of modes.  Verdicts that are open because of something that the
        backend is `allowed` to lack do not count.  A cell whose cases were all declined does not count either.
        """
        found = []
        excused = {cell for cell, _, _ in self.lacking} - {cell for cell, _, _ in self.not_allowed(allowed)}
        for cell in self.required_cells(dtypes):
            size, dtype, kind = cell
            where = f"world size {size}, {dtype}, {kind} shards"
            counts = self.cells.get(cell, Counter())
            if cell in excused and not _is_open(_without_lacking(counts)):
                continue
            if counts and counts.keys() == {"declined"}:
                continue
            if _is_open(counts, required=True):
                found.append(f"{where}: {describe(counts) or 'no case'}")
                continue
            parts = sorted((key[1:], part) for key, part in self.claim_cells.items() if key[0] == cell)
            found += [
                f"{where}, {claim} on {family} values: {describe(part)}"
                for (claim, family), part in parts
                if _is_open(part)
            ]
        return found


def _is_open(counts: Counter[str], *, required: bool = False) -> bool:
    """True if more verdicts are open than conclusive, or if a `required` cell has no conclusive verdict."""
    conclusive = sum(counts[kind] for kind in CONCLUSIVE)
    return counts["inconclusive"] + counts["not_supported"] > conclusive or (required and conclusive == 0)


def _without_lacking(counts: Counter[str]) -> Counter[str]:
    return Counter({kind: count for kind, count in counts.items() if kind != "not_supported"})


def of_any_step(tensor: str) -> str:
    """Returns 'step.output' for 'step2.output', so that all training steps count together."""
    return re.sub(r"^step\d+\.", "step.", tensor)


def family_of(mode: str) -> str:
    """Returns 'real' for 'real-cancelling'.  equivtest judges all modes of a family in the same way."""
    return mode.partition("-")[0]


def describe(counts: Mapping[str, int]) -> str:
    """Returns text such as '12 holds, 3 inconclusive', the most frequent kind first."""
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in ordered if count)


def case_code(data: Mapping[str, Any]) -> str:
    fields = ", ".join(f"{name}={_as_code(value)!r}" for name, value in data["fields"].items())
    return f"{data['type']}({fields})"


def _as_code(value: Any) -> Any:
    return tuple(_as_code(item) for item in value) if isinstance(value, list) else value
