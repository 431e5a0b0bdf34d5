"""Tests if a green run could have been red: a claim must reject a run with a spoiled collective.

On a few cases the audit spoils each collective of the subject in turn, including the collectives that DDP and FSDP2
call from C++. `equivtest.ranks.observe.faults` lists the faults.  A decisive fault makes a result depend on the
operands of fewer ranks.  If no claim rejects a decisive fault in a collective, the claims do not check that the
collective uses other ranks' operands.  If the claims check this in no collective of a property, the property has shown
nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from equivtest.base import limits
from equivtest.base.collective import Collective
from equivtest.cases.case import Case
from equivtest.errors import Misuse
from equivtest.oracle.declared import load_arithmetics
from equivtest.property import Property, Space, resolved
from equivtest.ranks.messages import FAULTS, NO_FAULT, Fault
from equivtest.ranks.observe.moves import REDUCING, WITHOUT_OPERAND_OF_ALL
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.report.handover import AuditRow
from equivtest.search.audited import DECISIVE, Audit, Site, decisive
from equivtest.search.chunks import Chunk, draw_cases
from equivtest.search.known import KnownFailures
from equivtest.verdicts.compare import UNABLE
from equivtest.verdicts.judging import judge_replies
from equivtest.verdicts.verdict import WHOLE_RUN

CANNOT = "CannotSpoil"
"""Name of the exception that a rank's traceback shows if a collective cannot be spoiled."""

ANSWERED = ("answered", "not_in_mesh")
"""Outcomes of a rank that has finished its part of the case."""

SEED = "audit"
SPOILED_TIMES = 3
"""Largest duration of a run with a fault, as a multiple of its duration without a fault."""


def audit(
    prop: Property,
    pool: Pool,
    known: KnownFailures,
    world_sizes: Iterable[int],
    dtypes: tuple[str, ...],
    *,
    is_first_look: bool = False,
    is_thorough: bool = False,
) -> Audit:
    """Spoils the collectives of a property's subject, and returns which claims reject each fault.

    Args:
        world_sizes: World sizes of the runs. At least one of them must be above 1. The world size 1 is left out.
        is_first_look: If True, the audit ends as soon as a claim rejects a fault in one collective. If False, it ends
            after AUDIT_CASES // 2 cases if a claim has rejected a fault in each collective so far.
        is_thorough: If True, every kind of fault is tried on every case, for a table. If False, only decisive faults
            are tried, until a claim rejects one, and never after the first fault that hangs.

    Raises:
        BrokenSetup: ranks cannot start.
        Misuse: the subject breaks its contract with the harness without any fault.
    """
    started_s = time.monotonic()
    sizes = sorted(size for size in world_sizes if size > 1)
    prop = resolved(prop, pool, Space(tuple(sizes), dtypes))
    running = _Running(prop, pool, known, Audit(prop.subject, prop.without_collectives), is_first_look, is_thorough)
    tried: set[Case] = set()
    for num_cases in (limits.AUDIT_CASES, limits.AUDIT_LAST_CASES):
        running.visits = 0
        for case in _cases(prop, sizes, dtypes, num_cases):
            if running.is_enough:
                break
            if case not in tried:
                tried.add(case)
                running.audit_case(case)
        if not running.found.problem:
            break
    running.found.seconds = time.monotonic() - started_s
    return running.found


def _cases(prop: Property, world_sizes: Iterable[int], dtypes: tuple[str, ...], num_cases: int) -> Iterator[Case]:
    """Yields at most `num_cases` cases of each world size, with one draw of values and no flags."""
    for size in world_sizes:
        if not prop.is_empty(Space((size,), dtypes)):
            yield from _drawn(prop, size, dtypes, num_cases)


def _drawn(prop: Property, world_size: int, dtypes: tuple[str, ...], num_cases: int) -> list[Case]:
    cases = draw_cases(prop, Chunk(world_size, dtypes, 0, limits.AUDIT_CASES, SEED), num_cases)
    plain = [replace(case, values=case.values[:1], repeats=False, records=False, members=()) for case in cases]
    return list(dict.fromkeys(case for case in plain if not case.refusal))


@dataclass
class _Running:
    prop: Property
    pool: Pool
    known: KnownFailures
    found: Audit
    is_first_look: bool
    is_thorough: bool
    visits: int = 0
    spoiled_limit_s: float = limits.AUDIT_CASE_S

    @property
    def is_enough(self) -> bool:
        """True if further cases would show nothing new, or would cost too much."""
        if self.is_thorough:
            return False
        if self.found.hung:
            return True
        sites, seen = self.found.sites, self.found.seen
        is_shown = bool(seen)
        if is_shown and self.is_first_look:
            return True
        wanted = limits.AUDIT_CASES // 2 if sites and len(seen) == len(sites) else 2 * limits.AUDIT_CASES
        if not is_shown and self.found.cases < limits.AUDIT_CASES:
            return False
        return self.visits >= limits.AUDIT_VISITS or (is_shown and self.found.cases >= wanted)

    def audit_case(self, case: Case) -> None:
        """Runs the case without a fault, then once for each fault, and records which faults a claim rejects.

        If a claim fails without a fault, no fault is tried, unless the failure is known.
        """
        if self.known.forbids_run(self.prop.subject, case):
            return
        self._run(case, NO_FAULT)  # a first run may make groups
        replies = self._run(case, NO_FAULT)
        failing = self._failures(case, replies)
        calls = _calls(replies)
        self.spoiled_limit_s = _limit_of_spoiled(self.prop.limit_s, replies)
        if "declined" in failing:
            self.found.declined.append(next(reply.error_text for reply in replies if reply.outcome == "declined"))
        if failing.keys() & {*UNABLE}:
            return
        if calls is None or any(self.known.match(self.prop.subject, claim, case) is None for claim in failing):
            claim, kind = next(iter(failing.items()), ("answers", "none"))
            self.found.left_out.append(f"{claim}: {kind} in {case!r}")
            return
        self.found.cases += 1
        for fault, site in self._faults(case, calls):
            if self.is_thorough or not (self.found.hung or self._is_settled(site)):
                self._spoil(case, fault, site, failing)

    def _is_settled(self, site: Site) -> bool:
        seen = self.found.seen
        is_shown = bool(seen) if self.is_first_look else site in seen
        return is_shown or self.visits >= limits.AUDIT_VISITS * self.found.cases

    def _faults(self, case: Case, calls: Sequence[Collective]) -> Iterator[tuple[Fault, Site]]:
        """Yields (fault, site of the spoiled collective) for each fault to try, one kind of fault after the other."""
        sites: dict[Site, list[int]] = {}
        for index, call in enumerate(calls):
            sites.setdefault(_site(case, call), []).append(index)
        for kind in FAULTS:
            for site, indices in sites.items():
                if is_possible(kind, site.kind) if self.is_thorough else kind in decisive(site.kind):
                    for index in representatives(indices, [calls[index].size_bytes for index in indices]):
                        yield Fault(kind, index), site

    def _spoil(self, case: Case, fault: Fault, site: Site, failing: Mapping[str, str]) -> None:
        """Runs the case once with a fault, and counts the run and the claims that reject it.

        A run does not count if its collective could not be spoiled, if the fault changed no result, or if the run timed
        out and the case without the fault does not answer within the same time either.  `failing` has the claims that
        fail without the fault.
        """
        row = self.found.rows.setdefault((site, fault.kind), AuditRow(collective=str(site), fault=fault.kind))
        replies = self._run(case, fault)
        self.visits += 1
        is_concluded = not any(reply.outcome in UNABLE or CANNOT in reply.detail for reply in replies)
        if any(reply.outcome not in ANSWERED for reply in replies):
            again = self._run(case, NO_FAULT)  # new ranks make their groups before the next fault counts calls
            if any(reply.outcome == "timed_out" for reply in replies):
                is_concluded &= _answered_within(self.spoiled_limit_s, again)
                self.found.hung = self.found.hung or (str(site) if is_concluded else "")
        if is_concluded and not _is_unchanged(replies, fault.index):
            rejecting = self._failures(case, replies, is_spoiled=True).keys() - failing.keys()
            row.runs += 1
            row.rejected += bool(rejecting)
            row.by = dict(Counter(row.by) + Counter(rejecting))

    def _run(self, case: Case, fault: Fault) -> list[Reply]:
        limit_s = self.prop.limit_s if fault == NO_FAULT else self.spoiled_limit_s
        return self.pool.run(self.prop.subject, case, limit_s=limit_s, fault=fault)

    def _failures(self, case: Case, replies: Sequence[Reply], *, is_spoiled: bool = False) -> dict[str, str]:
        """Returns failing claim -> kind of failure for one run, or {kind: kind} if the run itself failed."""
        try:
            arithmetics = load_arithmetics(self.pool.backend.arithmetic)
            verdicts = judge_replies(self.prop.subject, case, replies, self.prop.claims, arithmetics)
        except Misuse:
            if is_spoiled:  # a spoiled collective may make an answer invalid
                return {"misuse": "misuse"}
            raise
        ended = [verdict.kind for verdict in verdicts if verdict.kind in (*WHOLE_RUN, *UNABLE)]
        if ended:
            return {str(ended[0]): ended[0]}
        return {verdict.claim: verdict.kind for verdict in verdicts if verdict.failed}


def _answered_within(limit_s: float, replies: Sequence[Reply]) -> bool:
    return all(reply.outcome in ANSWERED and reply.busy_s < limit_s for reply in replies)


def _limit_of_spoiled(limit_s: float, replies: Sequence[Reply]) -> float:
    took_s = max(reply.busy_s for reply in replies)
    return min(limit_s, max(limits.in_proportion(limits.AUDIT_CASE_S, limit_s), SPOILED_TIMES * took_s))


def _is_unchanged(replies: Sequence[Reply], index: int) -> bool:
    """True if all ranks answered, and a fault in their calls with the number `index` changed no result."""
    calls = [
        call for reply in replies for each in reply.answers for call in (each.collectives or ())[index : index + 1]
    ]
    return all(reply.outcome in ANSWERED for reply in replies) and all(call.is_unchanged for call in calls)


def _calls(replies: Sequence[Reply]) -> tuple[Collective, ...] | None:
    answers = next((reply.answers for reply in replies if reply.answers), None)
    return None if answers is None else answers[0].collectives


def representatives(indices: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Returns the numbers of a few calls at one site: the first, last and middle call, and the first call of each size.

    The first call may belong to a set-up, and calls with other sizes may have other purposes.
    """
    chosen = {indices[0], indices[-1], indices[(len(indices) - 1) // 2]}
    seen = {size for index, size in zip(indices, sizes, strict=True) if index in chosen}
    for index, size in zip(indices, sizes, strict=True):
        if size not in seen and len(chosen) < limits.AUDIT_CALLS:
            chosen.add(index)
            seen.add(size)
    return sorted(chosen)


def _site(case: Case, call: Collective) -> Site:
    group = "mesh" if call.group == f"{case.world_size} ranks" else call.group
    return Site(call.kind, call.phase, group)


def is_possible(fault: str, kind: str) -> bool:
    if fault == "doubled":
        return kind in REDUCING
    if fault in DECISIVE:
        return kind not in WITHOUT_OPERAND_OF_ALL
    return True
