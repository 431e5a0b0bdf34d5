"""Separates failures of torch from failures of the backend: a failing case runs once more on gloo and the CPU."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from equivtest.errors import BrokenSetup, Misuse
from equivtest.ranks.pool import Pool
from equivtest.report.handover import TORCHS
from equivtest.search.known import KnownFailures
from equivtest.verdicts.claims import Claim
from equivtest.verdicts.judging import judge
from equivtest.verdicts.verdict import Mismatch, Verdict

NOTHING = KnownFailures()


def set_torchs_apart(
    verdicts: Sequence[Verdict], claims: Sequence[Claim], gloo: Pool, known: KnownFailures = NOTHING
) -> list[Verdict]:
    """Returns the verdicts of `compare_with_gloo`, or `verdicts` if the case cannot run on gloo and the CPU."""
    try:
        return compare_with_gloo(verdicts, claims, gloo, known)
    except (Misuse, BrokenSetup):
        return list(verdicts)


def compare_with_gloo(
    verdicts: Sequence[Verdict], claims: Sequence[Claim], gloo: Pool, known: KnownFailures = NOTHING
) -> list[Verdict]:
    """Returns the verdicts on one case, in which torch's own failures are replaced by known failures.

    A failure is torch's own if the case fails in the same way on gloo and the CPU.

    Args:
        known: If an entry of this list covers the failure, the verdict has the reason of the entry.

    Raises:
        Misuse, BrokenSetup: the case cannot run on gloo and the CPU.
    """
    failed = [verdict for verdict in verdicts if verdict.failed]
    if not failed:
        return list(verdicts)
    names = {verdict.claim for verdict in failed}
    again = [claim for claim in claims if claim.name in names]
    found = judge(failed[0].subject, failed[0].case, gloo, again, limit_s=failed[0].limit_s)
    return [
        as_known(verdict, _reason(verdict, known))
        if verdict.failed and any(fails_alike(verdict, other) for other in found)
        else verdict
        for verdict in verdicts
    ]


def fails_alike(verdict: Verdict, other: Verdict) -> bool:
    """True if two verdicts on one case fail the same claim, by the same kind, at the same tensors.

    Each wrong tensor of `verdict` must be wrong in `other` too.  The worst element or the number of wrong elements on
    each rank must be equal, because roundings may decide which element is the worst.  A mismatch of a whole tensor,
    such as a wrong shape, must have the same result.  If a rank raised, the exceptions must be equal.  If a rank is
    silent or lost, the result is False.
    """
    same = (verdict.claim, verdict.kind, verdict.draw) == (other.claim, other.kind, other.draw)
    if not same or not other.failed:
        return False
    if wrong := verdict.judgement.mismatches:
        return all(any(_is_alike(each, found) for found in other.judgement.mismatches) for each in wrong)
    return _exception_in(verdict) == _exception_in(other) != ""


def _is_alike(first: Mismatch, second: Mismatch) -> bool:
    if first.tensor != second.tensor or math.isfinite(first.error) != math.isfinite(second.error):
        return False
    if first.local_index is None:
        return (first.rank, second.local_index, first.actual) == (second.rank, None, second.actual)
    same_element = (first.rank, first.local_index) == (second.rank, second.local_index)
    return same_element or (bool(first.extent) and first.extent == second.extent)


def _exception_in(verdict: Verdict) -> str:
    """Returns the class and first line of the exception that ended the run, or ''.  Numbers of devices are left out."""
    found = re.search(r" raised (\w+: .*)", verdict.detail.partition("\n")[0])
    return re.sub(r"\b[a-z]+:\d+\b", "DEVICE", found[1]) if found else ""


def as_known(verdict: Verdict, reason: str) -> Verdict:
    return replace(verdict, judgement=replace(verdict.judgement, kind="known", mismatches=()), known=reason)


def _reason(verdict: Verdict, known: KnownFailures) -> str:
    entry = known.match(verdict.subject, verdict.claim, verdict.case, verdict.kind)
    return f"{TORCHS} ({verdict.kind})" if entry is None else entry.reason
