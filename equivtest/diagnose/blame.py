"""Whose fault a failure is: that of a collective, of a kernel, or of the parallelization.

The failing case runs once more in a world whose ranks note every collective and every local operation with its
operands (`equivtest.ranks.observe.watching`).  Each is then judged by itself, from the operands that it really had:
whatever was handed to it, a right one gives what is right of that.  Where every call is right, what remains is which
calls the ranks make, and on what: the parallelization.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from equivtest.base import limits
from equivtest.diagnose.calls import Judged, judge_collectives, judge_operations
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
"""Kinds of failure behind which a wrong collective or a wrong kernel may be; all others are of what the ranks call."""

HELD = "unknown: the case held when its calls were watched"
DECLINED = "unknown: the program declined the case when its calls were watched"


def blame(failure: Verdict, pool: Pool, is_shown_by: Callable[[Sequence[Reply]], bool]) -> str:
    """Whose fault a failure is, beginning with 'collective', 'kernel', 'parallelization' or 'unknown'.

    Args:
        is_shown_by: Whether the replies to another run of its case show the failure.
    """
    if failure.kind not in OF_VALUES:
        return "parallelization: what fails hangs on no value"
    limit_s = failure.limit_s
    is_slow = limit_s > limits.CASE_S  # and needs its time to come to where it hangs
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
    if not any(events) and (faults := pool.faults_of(failure.case)):
        return f"collective: {faults[0]}"  # whose probe left no world alive: the case was not run
    cause = first_cause(replies)
    if cause is not None and cause.error_type == "CollectiveRaised":  # of `collectives`, which calls them one by one
        return f"collective: rank {cause.rank}: {cause.error_text}"
    blames = sorted((*collectives.blames, *operations.blames), key=lambda found: found.order)
    if blames:
        others = f" (and {len(blames) - 1} more that are wrong)" if len(blames) > 1 else ""
        return f"{blames[0].layer}: {blames[0].text}{others}"
    if is_shown_by(replies):
        return f"parallelization: {_in_words(collectives, operations)}"
    return DECLINED if any(reply.outcome == "declined" for reply in replies) else HELD


def with_fault(failure: Verdict, pool: Pool, claims: Sequence[Claim] | None = None) -> Verdict:
    """The failure, with whose fault it is, where another run is judged by the same claims."""

    def is_shown_by(replies: Sequence[Reply]) -> bool:
        arithmetics = load_arithmetics(pool.backend.arithmetic)
        try:
            found = judge_replies(failure.subject, failure.case, replies, claims, arithmetics)
        except Misuse:  # an answer that is none
            return True
        return any(is_alike(verdict, failure) for verdict in found)

    return replace(failure, fault=blame(failure, pool, is_shown_by))


def is_alike(verdict: Verdict, failure: Verdict) -> bool:
    """Whether a verdict on the same case says what the failure says: a run that breaks may break in other ways."""
    if failure.kind in WHOLE_RUN:
        return verdict.kind in WHOLE_RUN
    return verdict.failed and (verdict.claim, verdict.kind) == (failure.claim, failure.kind)


def _in_words(collectives: Judged, operations: Judged) -> str:
    """What was found right."""
    counts = f"{collectives.num_right} collectives and {operations.num_right} local operations"
    unjudged = sum(collectives.unjudged.values()) + sum(operations.unjudged.values())
    left = f"; {unjudged} more could not be judged" if unjudged else ""
    return f"every call is right from its operands: {counts} of all ranks{left}"
