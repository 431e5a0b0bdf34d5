"""Which rank failed by itself first, among those that failed."""

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
"""What gloo, NCCL and torch's stores say of a rank that did nothing wrong; lower case."""

FAILED = ("raised", "misused", "lost", "timed_out")


def first_cause(replies: Sequence[Reply]) -> Reply | None:
    """The reply of the rank that failed first and by itself, or None where none failed.

    Ranks that were silent come after those that raised or were lost, then those that only lost
    their peer, then those that wait for one in a collective; among these the earliest counts.
    """
    failed = [reply for reply in replies if reply.outcome in FAILED]
    return min(failed, key=lambda reply: (_remoteness(reply), reply.at_s, reply.rank), default=None)


def _remoteness(reply: Reply) -> int:
    """0 for a cause, more for what only follows from another rank's failure."""
    if reply.outcome == "timed_out":
        place = place_of(reply.detail)
        return 3 if place is not None and place.collective else 1
    text = reply.detail.lower()  # the whole traceback: a subject may have wrapped the backend's exception
    return 2 if any(words in text for words in LOST_ITS_PEER) else 0
