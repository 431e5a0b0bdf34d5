"""Verdicts from a case, what is expected of it and what the ranks replied: a pure function."""

from __future__ import annotations

from collections.abc import Sequence

from equivtest.cases.base import Case
from equivtest.errors import Misuse
from equivtest.oracle.expected import Expected
from equivtest.ranks.first_cause import first_cause
from equivtest.ranks.reply import Outcome, Reply
from equivtest.verdicts.claims import Claim, refuses
from equivtest.verdicts.verdict import Kind, Mismatch, Verdict

_KIND_OF: dict[Outcome, Kind] = {
    "raised": "raised",
    "lost": "lost",
    "timed_out": "timed_out",
    "not_supported": "not_supported",
}


def compare(
    subject: str, case: Case, draw: int, expected: Expected, replies: Sequence[Reply], claims: Sequence[Claim]
) -> list[Verdict]:
    """One verdict per claim on one draw.

    Where the run itself failed there is one verdict alone, under the first claim: no other
    claim was judged.

    Args:
        replies: One per rank of the case's world, in rank order.

    Raises:
        Misuse: a rank found that the subject breaks its contract with the harness.
    """
    ended = _judge_run(subject, case, draw, replies, claims[0])
    if ended is not None:
        return [ended]
    answers = {reply.rank: reply.answers[draw] for reply in replies if reply.outcome == "answered"}
    verdicts = []
    for claim in claims:
        judged = claim.judge(case, expected, answers)
        verdicts.append(
            Verdict(
                judged.kind,
                claim.name,
                subject,
                case,
                draw,
                judged.mismatches,
                judged.agreeing,
                judged.margin,
                margins=judged.margins,
            )
        )
    return verdicts


def _judge_run(subject: str, case: Case, draw: int, replies: Sequence[Reply], claim: Claim) -> Verdict | None:
    """The verdict on a run that did not end in answers, or that should not have."""
    cause = _cause(replies)
    if cause is not None and cause.outcome == "misused":
        raise Misuse(f"{subject}: {cause.error_text}")
    if claim is refuses:
        return _judge_refusal(subject, case, draw, replies)
    if cause is None:
        return None
    return Verdict(_KIND_OF[cause.outcome], claim.name, subject, case, draw, (), detail=_tell(cause, replies))


def _judge_refusal(subject: str, case: Case, draw: int, replies: Sequence[Reply]) -> Verdict:
    gone = _cause([reply for reply in replies if reply.outcome in ("lost", "timed_out", "not_supported")])
    if gone is not None:  # whatever its peers raised: no rank may hang
        return Verdict(_KIND_OF[gone.outcome], refuses.name, subject, case, draw, detail=_tell(gone, replies))
    cause = first_cause(replies)
    right = cause.error_type if cause else "an error"
    wrong = tuple(
        Mismatch("refusal", reply.rank, expected=f"{right} on every rank", actual=reply.error_type or reply.outcome)
        for reply in replies
        if reply.outcome != "raised" or reply.error_type != right
    )
    detail = _tell(cause, replies) if cause and wrong else ""
    return Verdict("not_refused" if wrong else "holds", refuses.name, subject, case, draw, wrong, detail=detail)


def _cause(replies: Sequence[Reply]) -> Reply | None:
    """The reply that ended the run: a failure's first cause, or that it was not supported at all."""
    return first_cause(replies) or next((reply for reply in replies if reply.outcome == "not_supported"), None)


def _tell(cause: Reply, replies: Sequence[Reply]) -> str:
    """The first cause in full, then one line per other rank, and the stacks of those that hung."""
    lines = [f"rank {cause.rank} of {len(replies)} {_in_words(cause)}", cause.detail.rstrip()]
    for reply in replies:
        if reply.rank != cause.rank:
            lines.append(f"rank {reply.rank} {_in_words(reply)}")
            if reply.outcome == "timed_out":
                lines.append(reply.detail.rstrip())
    return "\n".join(line for line in lines if line)


def _in_words(reply: Reply) -> str:
    words = {"answered": "answered", "lost": "was lost", "timed_out": "did not answer", "not_in_mesh": "took no part"}
    if reply.outcome == "raised":
        return (
            f"raised {reply.error_type}: {reply.error_text.strip().splitlines()[0] if reply.error_text.strip() else ''}"
        )
    if reply.outcome == "not_supported":
        return f"cannot: {reply.error_text}"
    return words.get(reply.outcome, reply.outcome)
