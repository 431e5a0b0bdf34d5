"""Derives verdicts from a case, its expected values and the ranks' replies, as a pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from equivtest.cases.case import Case
from equivtest.errors import Misuse
from equivtest.oracle.expected import Expected
from equivtest.ranks.first_cause import first_cause
from equivtest.ranks.reply import Answer, Reply
from equivtest.verdicts.claims import Claim, refuses
from equivtest.verdicts.verdict import FAILING, Judgement, Mismatch, Verdict

UNABLE = ("not_supported", "declined")
"""Outcomes after which a case is neither right nor wrong: the backend or the program does not support it."""

TRACEBACK = "Traceback (most recent call last):"
ASSERTION = "CUDA error: device-side assert triggered"


def compare(
    subject: str,
    case: Case,
    draw: int,
    expected: Sequence[Expected],
    replies: Sequence[Reply],
    claims: Sequence[Claim],
) -> list[Verdict]:
    """Returns one verdict per claim that applies to this draw of this case.

    If the run itself failed, there is only one verdict, under the first claim: no other claim was judged.

    Args:
        expected: The expected values, one entry per group of the case, in order.
        replies: The ranks' replies, one per process of the case's world, in order. Each of the case's groups is judged
            separately.

    Raises:
        Misuse: a rank reports that the subject breaks its contract with the harness.
    """
    ended = _judge_run(subject, case, replies, claims[0])
    if ended is not None:
        judgement, detail = ended
        name = claims[0].name
        return [Verdict(claim=name, subject=subject, case=case, judgement=judgement, draw=draw, detail=detail)]
    answers = {reply.rank: reply.answers[draw] for reply in replies if reply.outcome == "answered"}
    return [
        Verdict(claim=claim.name, subject=subject, case=case, judgement=judged, draw=draw)
        for claim in claims
        if claim.applies(case, draw) and (judged := _judge_groups(claim, case, expected, answers)) is not None
    ]


def _judge_groups(
    claim: Claim, case: Case, expected: Sequence[Expected], answers: Mapping[int, Answer]
) -> Judgement | None:
    """Judges a claim on each group of ranks.

    Returns the first failure. If no group fails, returns the first open judgement. If no judgement is open, returns the
    first judgement. Returns None if the claim finds nothing to judge in some group.
    """
    judged = []
    for group, right in zip(case.groups, expected, strict=True):
        found = claim.judge(case, right, {rank: answers[process] for rank, process in enumerate(group)})
        if found is None:
            return None
        wrong = (replace(mismatch, process=group[mismatch.rank]) for mismatch in found.mismatches)
        judged.append(replace(found, mismatches=tuple(wrong)))
    failed = (found for found in judged if found.kind in FAILING)
    worst = next(failed, None) or next((found for found in judged if found.kind != "holds"), judged[0])
    names = {name for found in judged for name in found.margins}
    margins = {name: max(found.margins.get(name, 0.0) for found in judged) for name in sorted(names)}
    return replace(worst, margin=max(found.margin for found in judged), margins=margins)


def _judge_run(subject: str, case: Case, replies: Sequence[Reply], claim: Claim) -> tuple[Judgement, str] | None:
    """Judges a run without judging tensors. Returns None if the tensors must be judged.

    A run is judged without tensors if some rank returned no tensors, or if the case must be refused. Then the result is
    (judgement, detail). The detail is a text for the message: see `_tell`. If every rank refused the case, the detail
    is ''.

    Raises:
        Misuse: a rank reports that the subject breaks its contract with the harness.
    """
    cause = _cause(replies)
    if cause is not None and cause.outcome == "misused":
        raise Misuse(f"{subject}: {cause.error_text}")
    if claim is refuses:
        return _judge_refusal(case, [reply for reply in replies if reply.outcome != "not_in_mesh"])
    return None if cause is None else (Judgement(cause.outcome), _tell(case, cause, replies))


def _judge_refusal(case: Case, found: Sequence[Reply]) -> tuple[Judgement, str]:
    replies = [_as_raised(reply) for reply in found]
    gone = _cause([reply for reply in replies if reply.outcome in ("lost", "timed_out", *UNABLE)])
    if gone is not None:  # even if its peers raised: no rank may hang
        return Judgement(gone.outcome), _tell(case, gone, replies)
    cause = first_cause(replies)
    right = cause.error_type if cause else "an error"
    wrong = tuple(
        Mismatch("refusal", reply.rank, f"{right} on every rank", reply.error_type or reply.outcome, process=reply.rank)
        for reply in replies
        if reply.outcome != "raised" or reply.error_type != right
    )
    return Judgement("not_refused" if wrong else "holds", wrong), _tell(case, cause, replies) if cause and wrong else ""


def _as_raised(reply: Reply) -> Reply:
    """Returns the reply of a rank that NCCL's watchdog ended after a failed assertion, as if the rank had raised it.

    A kernel of CUDA refuses an index outside of its limit by an assertion. Either the next call raises the error, or
    the watchdog of NCCL's group sees it first and ends the process.  Source: Watchdog::run of
    c10d/ProcessGroupNCCL.cpp, and AcceleratorError of torch/_C/__init__.pyi (2.13.0).
    """
    if reply.outcome == "lost" and f"watchdog thread terminated with exception: {ASSERTION}" in reply.detail:
        return replace(reply, outcome="raised", error_type="AcceleratorError", error_text=ASSERTION)
    return reply


def _cause(replies: Sequence[Reply]) -> Reply | None:
    """Returns the reply that ended the run. Returns None if no reply ended the run.

    If a rank failed, the result is the reply with the first cause of the failure. If no rank failed, the result is a
    reply that calls the case unsupported.
    """
    return first_cause(replies) or next((reply for reply in replies if reply.outcome in UNABLE), None)


def _tell(case: Case, cause: Reply, replies: Sequence[Reply]) -> str:
    lines = [f"{case.name_rank(cause.rank)} {_in_words(cause)}", _without_repetition(cause)]
    alike = [reply for reply in replies if (reply.outcome, reply.error_text) == ("raised", cause.error_text)]
    if len(alike) == len(replies) > 1:
        return "\n".join([f"every rank {_in_words(cause)}", *lines[1:], *case.on_raise()])
    for reply in replies:
        if reply.rank != cause.rank:
            name = case.name_rank(reply.rank) if case.members else f"rank {reply.rank}"
            lines.append(f"{name} {_in_words(reply)}")
            if reply.outcome == "timed_out":
                lines.append(reply.detail.rstrip())
    return "\n".join(line for line in lines if line)


def _without_repetition(cause: Reply) -> str:
    """Returns the detail of a reply. Of a traceback only the frames are left, because the message has the exception."""
    lines = cause.detail.rstrip().splitlines()
    if cause.outcome == "raised" and lines and lines[0] == TRACEBACK and lines[-1].endswith(_first_line(cause)):
        lines = lines[1:-1]
    return "\n".join(lines)


def _first_line(reply: Reply) -> str:
    return next(iter(reply.error_text.strip().splitlines()), "")


def _in_words(reply: Reply) -> str:
    words = {"answered": "answered", "lost": "was lost", "timed_out": "did not answer", "not_in_mesh": "took no part"}
    if reply.outcome == "raised":
        return f"raised {reply.error_type}: {_first_line(reply)}"
    if reply.outcome == "not_supported":
        return f"cannot: {reply.error_text}"
    if reply.outcome == "declined":
        return f"does not support the case: {reply.error_text}"
    return words.get(reply.outcome, reply.outcome)
