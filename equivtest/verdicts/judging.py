"""Runs a case on the ranks, judges it, and raises its failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

import torch

from equivtest.base import limits
from equivtest.cases.case import Case
from equivtest.errors import BrokenSetup, Inconclusive, Misuse
from equivtest.oracle import expect_held
from equivtest.oracle.declared import Arithmetics, declared, load_arithmetics, order_varies
from equivtest.oracle.expected import Expected
from equivtest.oracle.rounding import TORCH_CPU
from equivtest.property import require_limit
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.ranks.support import Finding
from equivtest.verdicts.claims import (
    Claim,
    agrees_on_all_ranks,
    does_not_touch_its_inputs,
    equals_unsharded,
    gradients_equal_unsharded,
    keeps_layout_of_parameter,
    refuses,
    trains_like_unsharded,
    uses_only_collectives,
)
from equivtest.verdicts.compare import compare
from equivtest.verdicts.message import write_message
from equivtest.verdicts.verdict import KINDS, Verdict

DEFAULT_CLAIMS = (
    equals_unsharded,
    gradients_equal_unsharded,
    agrees_on_all_ranks,
    keeps_layout_of_parameter,
    does_not_touch_its_inputs,
)
"""The claims that are judged on a subject whose property lists no others."""


def default_claims(case: Case) -> tuple[Claim, ...]:
    """Returns the claims that are judged on a case if the caller lists no claims."""
    if case.refusal:
        return (refuses,)
    training = (trains_like_unsharded,) if case.trains else ()
    return (*DEFAULT_CLAIMS, *training, *((uses_only_collectives,) if case.records else ()))


def check(
    subject: str, case: Case, pool: Pool, claims: Sequence[Claim] | None = None, *, limit_s: float = limits.CASE_S
) -> list[Verdict]:
    """Runs `case`. Raises if a claim fails, or if no claim holds.

    Args:
        subject: Registered name, or 'package.module:function'.
        claims: Claims that are judged, in this order. If None, `default_claims` are judged.
        limit_s: Number of seconds that the visit of the case may take.

    Returns:
        The verdicts, one per claim and draw. Each verdict holds or is inconclusive, and at least one holds.

    Raises:
        ClaimFailed: the subclass for the first failure's kind.
        Misuse: the subject is unknown or breaks its contract with the harness, or limit_s is invalid.
        Inconclusive, BrokenSetup: the run shows nothing, see `require_conclusion`.
    """
    verdicts = judge(subject, case, pool, claims, limit_s=limit_s)
    for verdict in verdicts:
        if verdict.kind in KINDS:
            raise_for(verdict)
    require_conclusion(subject, case, verdicts, pool.faults_of(case))
    return verdicts


def require_conclusion(subject: str, case: Case, verdicts: Sequence[Verdict], faults: Sequence[Finding] = ()) -> None:
    """Raises unless some verdict holds or fails: a run that shows nothing must not look like a pass.

    Args:
        faults: Faults that probes found in the backend. If there is a fault, a verdict that holds shows nothing either.

    Raises:
        BrokenSetup: the backend does not support the case, or a probe has found a fault in the backend.
        Inconclusive: no claim applies to the case, its values decide nothing, or the program declines.
    """
    if any(verdict.failed for verdict in verdicts):
        return
    if faults:
        raise BrokenSetup(f"{subject}: the backend is wrong, so nothing was shown: {faults[0]}")
    if any(verdict.kind == "holds" for verdict in verdicts):
        return
    if any(verdict.kind == "not_supported" for verdict in verdicts):
        raise BrokenSetup(f"{subject}: this backend does not support {case!r}, so nothing was shown")
    if said := next((verdict.detail for verdict in verdicts if verdict.kind == "declined"), ""):
        raise Inconclusive(f"{subject}: nothing was shown in {case!r}: {said.splitlines()[0]}")
    if verdicts:
        raise Inconclusive(
            f"{subject}: nothing was shown in {case!r}: the bounds are too wide, since a right answer may be "
            "off by more than a tenth of its values; use exact values or another seed"
        )
    raise Inconclusive(
        f"{subject}: nothing was shown in {case!r}: none of these claims applies to it; pass other claims"
    )


def judge(
    subject: str,
    case: Case,
    pool: Pool,
    claims: Sequence[Claim] | None = None,
    *,
    limit_s: float = limits.CASE_S,
    may_raise: bool = False,
) -> list[Verdict]:
    """Runs `case` and returns every verdict, draw by draw, including verdicts that fail or are inconclusive.

    Args:
        subject, claims, limit_s: Same as in `check`.
        may_raise: Same as in `Pool.run`.

    Raises:
        Misuse: the subject is unknown or breaks its contract with the harness, or limit_s is invalid.
    """
    require_limit(limit_s)
    if not subject.isprintable():
        raise Misuse(f"a subject must be a short name or package.module:function, got {subject!r}")
    replies = pool.run(subject, case, limit_s=limit_s, may_raise=may_raise)
    verdicts = judge_replies(subject, case, replies, claims, load_arithmetics(pool.backend.arithmetic))
    return [replace(verdict, limit_s=limit_s) for verdict in verdicts]


def judge_replies(
    subject: str,
    case: Case,
    replies: Sequence[Reply],
    claims: Sequence[Claim] | None = None,
    arithmetics: Arithmetics = TORCH_CPU,
    *,
    until: tuple[str, str] | None = None,
) -> list[Verdict]:
    """Returns the verdicts on a run that has ended, for all draws in order.

    If some rank returned no tensors, or if the case must be refused, there are no values to judge. Then all verdicts
    are on draw 0: see `compare`.

    Args:
        replies: The ranks' replies, one per process of the case's world, in order.
        claims: Claims that are judged, in this order. If None, `default_claims` are judged.
        arithmetics: Declared arithmetic by which real values are judged.
        until: The (claim, kind) of a failure that ends the judgement: after the first draw with this failure, no draw
            is judged. If None, all draws are judged.
    """
    answered = all(reply.outcome in ("answered", "not_in_mesh") for reply in replies)
    claims = claims or default_claims(case)
    if not answered or case.refusal:
        return compare(subject, case, 0, [Expected({}, {})] * len(case.groups), replies, claims)
    verdicts = []
    with one_thread(), declared(arithmetics):
        for draw in range(len(case.values)):
            verdicts += compare(subject, case, draw, expected_of(case, draw, replies), replies, claims)
            if any((verdict.claim, verdict.kind) == until for verdict in verdicts):
                break
    return verdicts


def expected_of(case: Case, draw: int, replies: Sequence[Reply]) -> list[Expected]:
    """Returns the expected values of a draw for each group. They may depend on ranks' tensors: see `expect_held`."""
    varies = case.repeats and draw == 0 and order_varies(case.dtypes)
    expectations = []
    for group in case.groups:
        answers = {rank: replies[process].answers[draw] for rank, process in enumerate(group)}
        expected = expect_held(case, draw, {rank: answer.tensors for rank, answer in answers.items()})
        if varies:
            again = expect_held(case, draw, {rank: answer.again for rank, answer in answers.items()})
            expected = replace(expected, again=again)
        expectations.append(expected)
    return expectations


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to this thread, because threads that wait for tiny work in a loop take cores from the ranks."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def raise_for(verdict: Verdict) -> NoReturn:
    raise KINDS[verdict.kind](verdict, write_message(verdict))
