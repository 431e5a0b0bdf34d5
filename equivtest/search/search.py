"""Searches one chunk: draws and runs cases, judges every claim, and shrinks failures.

All claims are judged from one run of each case.  Then each failing (claim, kind) is shrunk separately, so that no
failure masks another failure.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import hypothesis
from hypothesis import Phase

from equivtest.base import limits
from equivtest.cases.case import Case
from equivtest.diagnose.blame import is_alike, with_fault
from equivtest.errors import Misuse
from equivtest.oracle.declared import load_arithmetics
from equivtest.property import Property, resolved
from equivtest.ranks.inbox import silence
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.report.handover import CaseState, Coverage, Failure, Record
from equivtest.search.chunks import SETTINGS, Chunk, chunk_cases, replay_of, seed_of
from equivtest.search.coverage import coverage_of
from equivtest.search.differential import as_known, set_torchs_apart
from equivtest.search.filling import fill, short_of_conclusions, short_of_draws
from equivtest.search.known import KnownFailure, KnownFailures
from equivtest.search.local_constants import no_local_constants
from equivtest.search.records import records_of, refused_in
from equivtest.search.replay import write_replay
from equivtest.verdicts.judging import judge_replies, raise_for
from equivtest.verdicts.message import write_brief_message
from equivtest.verdicts.verdict import CONCLUSIVE, WHOLE_RUN, ClaimFailed, Judgement, Verdict

ROUNDS = 30
"""Largest number of times that a search adds cases to fill cells.  A cell that is often inconclusive needs several."""

Target = tuple[str, str]
"""(claim, kind of failure)."""


@dataclass(frozen=True)
class Findings:
    """Results of a search.

    Attributes:
        misuse: The mistake in the subject or the property that ended the search early, or ''.
        left_out: Dtype of the chunk in which no case of the property can be judged -> the reason, or ''.
        coverage: The cases of the chunk's covering array, with their results. None if the cases are random.
        cut: Number of cases that were left out because the time was over.
    """

    records: list[Record]
    failures: list[Failure]
    seconds: float
    misuse: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    coverage: Coverage | None = None
    cut: int = 0


def never(case: Case) -> bool:
    return False


def search(
    prop: Property,
    chunk: Chunk,
    pool: Pool,
    known: KnownFailures,
    failures_dir: Path,
    *,
    only: Target | None = None,
    is_enough: Callable[[Case], bool] = never,
    until_s: float = math.inf,
    gloo: Callable[[], Pool] | None = None,
) -> Findings:
    """Runs and judges every case of a chunk, and shrinks the failures.

    If the subject or the property raises a Misuse, the search stops, and the findings so far are returned.

    Args:
        failures_dir: Directory for replay files. The first file creates it.
        only: The (claim, kind) of the only failure of interest. The first such failure ends the run, and no other
            failure is shrunk. The failure's message then has no cause, and no history of earlier cases.
        is_enough: Function that returns True if a failing case is so small that shrinking can end.
        until_s: Time, as time.monotonic() gives it, after which no case begins except the first. If this time is
            finite, the cases that cover the most combinations run first, and examples run last.
        gloo: Function that returns a pool of gloo on the CPU, on which cases that fail on another backend run again.
            None if the backend is gloo on the CPU.
    """
    started_s = time.monotonic()
    running = Searching(prop, chunk, pool, known, only, is_enough, until_s, gloo)
    misuse = running.run()
    failures = []
    for target in running.targets():
        if only in (None, target):
            smallest = running.confirmed(running.shrink(target))
            explained = smallest if only else with_fault(running.explained(smallest), pool, prop.claims)
            failures.append(_write_up(explained, pool, failures_dir))
    seconds = time.monotonic() - started_s
    return Findings(running.records, failures, seconds, misuse, running.left_out, running.coverage(), running.cut)


def _write_up(smallest: Verdict, pool: Pool, failures_dir: Path) -> Failure:
    path = write_replay(smallest, pool.backend, failures_dir)
    return Failure(
        subject=smallest.subject,
        claim=smallest.claim,
        kind=smallest.kind,
        message=write_brief_message(smallest, str(path)),
        replay=str(path),
        case=repr(smallest.case),
        fault=smallest.fault,
        history=smallest.history,
        drawing=next((each.drawing for each in smallest.judgement.mismatches), None),
    )


class _Enough(BaseException):
    """Raised at a failure to end Hypothesis' search.  Hypothesis catches an Exception, but no BaseException."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__()
        self.verdict = verdict


@dataclass
class Searching:
    prop: Property
    chunk: Chunk
    pool: Pool
    known: KnownFailures
    only: Target | None = None
    is_enough: Callable[[Case], bool] = never
    until_s: float = math.inf
    gloo: Callable[[], Pool] | None = None
    failing: dict[Target, Verdict] = field(default_factory=dict)
    seen: dict[Case, dict[Target, Verdict]] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    left_out: Mapping[str, str] = field(default_factory=dict)
    broken_runs: int = 0
    states: dict[Case, CaseState] = field(default_factory=dict)
    cut: int = 0

    def coverage(self) -> Coverage | None:
        if self.left_out and self.prop.is_empty(self.chunk.space):
            return None
        return coverage_of(self.prop, self.chunk, lambda case: self.states.get(case, "open"))

    def run(self) -> str:
        """Runs and judges the chunk's cases. Returns the mistake that ended the search early, or ''."""
        try:
            self.prop = resolved(self.prop, self.pool, self.chunk.space)
            self.left_out = self.prop.left_out(self.chunk.space)
            if self.prop.is_empty(self.chunk.space):
                return ""
            cases = chunk_cases(self.prop, self.chunk)
            if self.until_s < math.inf:
                cases.sort(key=lambda case: case in self.prop.examples)
            if self.chunk.per_cell:
                self.judge_and_fill(cases)
            else:
                self.judge_cases(cases)
        except Misuse as error:
            return str(error)
        return ""

    def judge_and_fill(self, cases: list[Case]) -> None:
        """Runs the cases, then further cases until every cell has enough conclusions, in at most ROUNDS rounds."""
        missing = short_of_draws(self.prop, self.chunk, cases, self._is_judged)
        self.judge_cases(cases + fill(self.prop, self.chunk, cases, missing, self._is_judged))
        for number in range(1, ROUNDS + 1):
            missing = short_of_conclusions(self.prop, self.chunk, self.records)
            chunk = replace(self.chunk, seed=f"{self.chunk.seed}, round {number}")
            further = fill(self.prop, chunk, self.seen, missing, self._is_judged)
            if not further or time.monotonic() > self.until_s or self.broken_runs >= limits.BROKEN_RUNS:
                break
            self.judge_cases(further)

    def judge_cases(self, cases: Sequence[Case]) -> None:
        """Runs and judges the cases in order.  If `only` is set, the method stops at the first failure of that claim
        and kind.

        The method also records the cases that a known failure forbids to run.  If the backend refuses one collective of
        a case, the case runs again without that collective.
        """
        barred = {case: entry for case in cases if (entry := self.known.forbids_run(self.prop.subject, case))}
        self.states |= dict.fromkeys(barred, "known")
        for case, entry in barred.items():
            self.records += barred_records(self.prop.subject, case, entry)
        left: list[Case] = []
        for case, replies in self._runs([case for case in cases if case not in barred]):
            verdicts = self.judge(case, replies)
            self.states[case] = state_of(verdict.kind for verdict in verdicts)
            left += rest_of(case, refused_in(replies))
            self.records += records_of(case, verdicts, replies)
            self.broken_runs += any(verdict.kind in WHOLE_RUN for verdict in verdicts)
            if self.broken_runs >= limits.BROKEN_RUNS or self.only in self.failing:
                return
        if further := [case for case in dict.fromkeys(left) if case not in self.seen]:
            self.judge_cases(further)

    def _runs(self, cases: Sequence[Case]) -> Iterable[tuple[Case, list[Reply]]]:
        """Yields each case with its replies.  If `only` is set, no case runs before the previous case is judged."""
        if self.only is None:
            return self.pool.run_all(self.prop.subject, self._in_time(cases), limit_s=self.prop.limit_s)
        return ((case, self._run(case, "")) for case in cases)

    def _in_time(self, cases: Sequence[Case]) -> Iterator[Case]:
        for place, case in enumerate(cases):
            if time.monotonic() >= self.until_s and (place or self.seen):
                self.cut += len(cases) - place
                return
            yield case

    def explained(self, smallest: Verdict) -> Verdict:
        """Returns the smallest failure with its history, and a line on the first failure if its tensor differs."""
        first = self.failing[smallest.claim, smallest.kind]
        if first.first_tensor != smallest.first_tensor:
            text = (
                f"{first.first_tensor} was the first wrong tensor, in {first.case!r}: check if both failures have the "
                "same cause"
            )
            smallest = replace(smallest, shrunk_from=text)
        return self.with_history(smallest)

    def with_history(self, failure: Verdict) -> Verdict:
        """Returns the failure, with one more line if its case does not fail alone in new ranks.

        A case that timed out has a shorter limit here.  If the case exceeds the shorter limit too, no line is added.
        """
        case = failure.case
        earlier = [
            ran for ran in list(self.seen)[: list(self.seen).index(case)] if ran.num_processes == case.num_processes
        ]
        self.pool.renew(case.num_processes)
        try:
            verdicts = self._verdicts(case, self._run(case, failure.kind))
        except Misuse:
            return failure
        if any(is_alike(verdict, failure) for verdict in verdicts):
            return failure
        what = "is declined" if any(verdict.kind == "declined" for verdict in verdicts) else "holds"
        first = f", the first of them {earlier[0]!r}" if earlier else ", but after cases of earlier searches"
        visits = f"{len(earlier)} earlier cases of this search on as many ranks"
        return replace(failure, history=f"the case {what} alone in new ranks; it failed after {visits}{first}")

    def _run(self, case: Case, kind: str) -> list[Reply]:
        """Runs a case once more, to see a failure of `kind` again.  To repeat a time-out, the case gets less time."""
        limit_s = self.prop.limit_s
        if kind == "timed_out":
            limit_s = limits.in_proportion(limits.SHRINK_CASE_S, limit_s)
        replies = self.pool.run(self.prop.subject, case, limit_s=limit_s)
        allowed_s, whole_s = (
            self.pool.visit_limit_s(each, case.num_processes) for each in (limit_s, self.prop.limit_s)
        )
        said, told = silence(allowed_s), silence(allowed_s) + _of_tries(allowed_s, whole_s)
        return [replace(reply, detail=reply.detail.replace(said, told, 1)) for reply in replies]

    def judge(self, case: Case, replies: Sequence[Reply], only: Target | None = None) -> list[Verdict]:
        """Returns the verdicts on one run of a case, and records all failures except known failures.

        If `only` is set, only its claim is judged.
        """
        verdicts = [self._unless_known(verdict) for verdict in self._verdicts(case, replies, only)]
        if self.gloo is not None and any(verdict.failed for verdict in verdicts):
            verdicts = set_torchs_apart(verdicts, self.prop.claims, self.gloo(), self.known)
        self.seen[case] = {}
        for verdict in verdicts:
            if verdict.failed:
                target = (verdict.claim, verdict.kind)
                self.seen[case].setdefault(target, verdict)
                self.failing.setdefault(target, verdict)
        return verdicts

    def _is_judged(self, case: Case, claim: str) -> bool:
        return self.known.match(self.prop.subject, claim, case) is None

    def _verdicts(self, case: Case, replies: Sequence[Reply], only: Target | None = None) -> list[Verdict]:
        claims = [claim for claim in self.prop.claims if only is None or claim.name == only[0]]
        arithmetics = load_arithmetics(self.pool.backend.arithmetic)
        verdicts = judge_replies(self.prop.subject, case, replies, claims, arithmetics, until=only)
        return [replace(verdict, limit_s=self.prop.limit_s) for verdict in verdicts]

    def _unless_known(self, verdict: Verdict) -> Verdict:
        """Marks a failure as known if a list has an entry for it. A shipped entry counts only on gloo and the CPU."""
        if not verdict.failed:
            return verdict
        known = self.known if self.gloo is None else self.known.own
        entry = known.match(verdict.subject, verdict.claim, verdict.case, verdict.kind)
        return verdict if entry is None else as_known(verdict, entry.reason)

    def targets(self) -> Iterator[Target]:
        """Yields each failing (claim, kind) once, even if it first fails while another failure is shrunk."""
        done: set[Target] = set()
        while waiting := [target for target in self.failing if target not in done]:
            done.add(waiting[0])
            yield waiting[0]

    def shrink(self, target: Target) -> Verdict:
        """Returns the smallest failure of the target's claim and kind that is found within limits.SHRINK_S.

        If the property has a longer limit per case, there is more time.  Hypothesis searches first on fewer ranks, but
        on at least two, and then on the failure's own world size.  If the caller has passed `is_enough`, the failure's
        own world size comes first, because `is_enough` can end the search at a small case.
        """
        until_s = time.monotonic() + limits.SHRINK_S * max(1.0, self.prop.limit_s / limits.CASE_S)
        found = self.failing[target]
        if self.is_enough is not never:
            found = found if self.is_enough(found.case) else self._find(target, self.chunk, until_s) or found
            if self.is_enough(found.case):
                return found
        for world_size in self.chunk.smaller_world_sizes:
            chunk = replace(self.chunk, world_size=world_size, num_cases=limits.SHRINK_TRIES)
            smallest = self._find(target, chunk, until_s)
            if smallest is not None:
                return smallest
        own = replace(self.chunk, num_cases=max(self.chunk.num_cases, limits.SHRINK_TRIES))
        return self._find(target, own, until_s) or found

    def confirmed(self, smallest: Verdict) -> Verdict:
        """Returns the smallest failure if that failure is real, and otherwise the first failure.

        A time-out that was found with a shortened limit is real if the case also times out with the whole limit.
        """
        first = self.failing[smallest.claim, smallest.kind]
        if smallest.kind != "timed_out" or smallest is first or self.prop.limit_s <= limits.CASE_S:
            return smallest
        with contextlib.suppress(Misuse):
            replies = self.pool.run(self.prop.subject, smallest.case, limit_s=self.prop.limit_s)
            found = self._verdicts(smallest.case, replies)
            return next((verdict for verdict in found if verdict.kind == smallest.kind), first)
        return first

    def _find(self, target: Target, chunk: Chunk, until_s: float) -> Verdict | None:
        """Lets Hypothesis search the chunk, and returns the smallest failure of the target, or None."""

        def holds(case: Case) -> None:
            verdict = self._look(self.chunk.fitted(case), target, until_s)
            if verdict is not None and self.is_enough(case):
                raise _Enough(verdict)
            if verdict is not None:
                raise_for(verdict)

        settings = hypothesis.settings(
            max_examples=chunk.num_cases,
            phases=[Phase.reuse, Phase.generate, Phase.shrink],
            **SETTINGS | {"database": replay_of(self.prop, self.chunk, self.failing[target].case)},
        )
        try:
            judged = hypothesis.given(self.prop.cases(chunk.space))(holds)
            with no_local_constants():
                hypothesis.seed(seed_of(self.prop, chunk))(settings(judged))()
        except _Enough as found:
            return found.verdict
        except ClaimFailed as failure:
            return failure.verdict
        except Misuse:  # the property refuses so small a world
            return None
        return None

    def _look(self, case: Case, target: Target, until_s: float) -> Verdict | None:
        """Returns the target's failure if `case` shows it, or None.  After the time limit no new case runs."""
        if case not in self.seen:
            if time.monotonic() > until_s or self.known.forbids_run(self.prop.subject, case):
                return None
            self.seen[case] = {}
            with contextlib.suppress(Misuse):  # the subject gives no valid answer: another failure
                self.judge(case, self._run(case, target[1]), self.only)
        return self.seen[case].get(target)


def state_of(verdicts: Iterable[str]) -> CaseState:
    kinds = set(verdicts)
    return "known" if "known" in kinds else "judged" if kinds.intersection(CONCLUSIVE) else "open"


def _of_tries(limit_s: float, of_a_run_s: float) -> str:
    if limit_s == of_a_run_s:
        return ""
    return f", the limit while equivtest shrinks a time-out; before shrinking the limit was {of_a_run_s:g} s"


def barred_records(subject: str, case: Case, entry: KnownFailure) -> list[Record]:
    judgement = Judgement("known")
    verdict = Verdict(claim=entry.claim, subject=subject, case=case, judgement=judgement, known=entry.reason)
    return records_of(case, [verdict], [])


def rest_of(case: Case, refused: Collection[str]) -> list[Case]:
    """Returns [the variant of the case that calls none of the `refused` collectives], or [] without such a variant."""
    rest = case.without(set(refused)) if refused else None
    return [] if rest is None else [rest]
