"""Finds the cause of a failure: a collective, a kernel, an operator on DTensors, or the parallelization.

The failing case runs once more on ranks that note every collective, every local operation and every operator on
DTensors with its operands (`equivtest.ranks.observe.watching`).  Then each call is judged alone: its results must be
right for its actual operands, even if the operands are wrong.  If every call is right, the parallelization is the
cause: the ranks make wrong calls, or pass wrong operands.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from equivtest.base import limits
from equivtest.diagnose.calls import Judged, judge_collectives, judge_operations
from equivtest.diagnose.operators import judge_operators
from equivtest.diagnose.watched import read_events
from equivtest.errors import EquivtestError, Misuse
from equivtest.oracle.declared import declared, load_arithmetics
from equivtest.ranks.first_cause import first_cause
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.verdicts.claims import Claim
from equivtest.verdicts.judging import judge_replies, one_thread
from equivtest.verdicts.verdict import WHOLE_RUN, Verdict

OF_VALUES = ("value", "bits", "replica", "repeat", "touched", "raised", "lost", "timed_out")
"""Kinds of failure that a wrong collective or kernel may cause.  Other kinds come from the ranks' choice of calls."""

HELD = "unknown: the case held when its calls were watched"
DECLINED = "unknown: the program declined the case when its calls were watched"


def blame(failure: Verdict, pool: Pool, is_shown_by: Callable[[Sequence[Reply]], bool]) -> str:
    """Runs the case of a failure again, and returns the cause as text, such as 'collective: ...'.

    Args:
        is_shown_by: Returns True if the replies to the new run show the failure too.
    """
    if failure.kind not in OF_VALUES:
        return "parallelization: the failure does not depend on values"
    limit_s = failure.limit_s
    is_slow = limit_s > limits.CASE_S  # then it needs its time to reach the call that hangs
    if failure.kind == "timed_out" and not is_slow:
        limit_s = min(limits.SHRINK_CASE_S, limit_s)
    with tempfile.TemporaryDirectory(prefix="equivtest-watched-") as folder:
        try:
            replies = pool.watch(failure.subject, failure.case, folder, limit_s)
        except EquivtestError as error:
            return f"unknown: the case could not be watched: {error}"
        with one_thread(), declared(load_arithmetics(pool.backend.arithmetic)):
            events = [read_events(Path(folder), reply.rank) for reply in replies]
            collectives, operations = judge_collectives(events, replies), judge_operations(events)
            operators = judge_operators(events)
    if not any(events) and (faults := pool.faults_of(failure.case)):
        return f"collective: {faults[0]}"  # a probe left no world alive: the case was not run
    cause = first_cause(replies)
    if cause is not None and cause.error_type == "CollectiveRaised":  # from `collectives`, which calls them one by one
        return f"collective: rank {cause.rank}: {cause.error_text}"
    blames = sorted((*collectives.blames, *operations.blames, *operators.blames), key=lambda found: found.order)
    if blames:
        others = f" (and {len(blames) - 1} more calls are wrong)" if len(blames) > 1 else ""
        return f"{blames[0].layer}: {blames[0].text}{others}"
    if is_shown_by(replies):
        return f"parallelization: {_in_words(collectives, operations, operators)}"
    return DECLINED if any(reply.outcome == "declined" for reply in replies) else HELD


def with_fault(failure: Verdict, pool: Pool, claims: Sequence[Claim] | None = None) -> Verdict:
    """Returns the failure with its cause, which `blame` finds in another run of the case.

    Args:
        claims: Claims by which the other run is judged. If None, these are the default claims of the case.
    """

    def is_shown_by(replies: Sequence[Reply]) -> bool:
        arithmetics = load_arithmetics(pool.backend.arithmetic)
        try:
            found = judge_replies(failure.subject, failure.case, replies, claims, arithmetics)
        except Misuse:  # an invalid answer
            return True
        return any(is_alike(verdict, failure) for verdict in found)

    return replace(failure, fault=blame(failure, pool, is_shown_by))


def is_alike(verdict: Verdict, failure: Verdict) -> bool:
    """True if a verdict on the same case fails the same claim in the same way.

    If the whole run failed, any failure of the whole run counts.  For example, a rank that died may hang the next time.
    """
    if failure.kind in WHOLE_RUN:
        return verdict.kind in WHOLE_RUN
    return verdict.failed and (verdict.claim, verdict.kind) == (failure.claim, failure.kind)


def _in_words(collectives: Judged, operations: Judged, operators: Judged) -> str:
    counts = f"{collectives.num_right} collectives and {operations.num_right} local operations of all ranks"
    also = f", {operators.num_right} operators on DTensors" if operators.num_right else ""
    unjudged = sum(sum(each.unjudged.values()) for each in (collectives, operations, operators))
    left = f"; {unjudged} more calls could not be judged" if unjudged else ""
    return f"every call is right for its operands: {counts}{also}{left}"
