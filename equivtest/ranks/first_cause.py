"""Finds, among the replies to a case, the rank whose failure caused the failures of other ranks."""

from __future__ import annotations

from collections.abc import Sequence

from equivtest.ranks.places import place_of
from equivtest.ranks.reply import Reply

LOST_ITS_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "broken pipe",
    "remote process exited",
    "socket closed",
    "timeout caused pair closure",
    "communicator was aborted",
)
"""Phrases, in lower case, with which gloo, NCCL and torch's stores report that another rank is gone."""

FAILED = ("raised", "misused", "lost", "timed_out")


def first_cause(replies: Sequence[Reply]) -> Reply | None:
    """Returns the reply of the rank that caused the failure, or None if no rank failed.

    The first candidates are ranks that raised or were lost, then silent ranks, then ranks that only lost their peer,
    then ranks that wait in a collective. Among several candidates of one kind the cause is the earliest.
    """
    failed = [reply for reply in replies if reply.outcome in FAILED]
    return min(failed, key=lambda reply: (_remoteness(reply), reply.at_s, reply.rank), default=None)


def _remoteness(reply: Reply) -> int:
    if reply.outcome == "timed_out":
        place = place_of(reply.detail)
        return 3 if place is not None and place.collective else 1
    text = reply.detail.lower()  # the whole traceback: a subject may have wrapped the backend's exception
    return 2 if any(words in text for words in LOST_ITS_PEER) else 0
