"""Which rank failed by itself first, among those that failed."""

from __future__ import annotations

from collections.abc import Sequence

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
WAITING_FOR_PEERS = "torch/distributed/distributed_c10d.py"
"""In the stacks of a rank that sits in a collective."""


def first_cause(replies: Sequence[Reply]) -> Reply | None:
    """The reply of the rank that failed first and by itself, or None where none failed.

    Ranks that were silent come after those that raised or were lost, and ranks that only lost
    their peer, or wait for it, after those; then the earliest counts.
    """
    failed = [reply for reply in replies if reply.outcome in FAILED]
    return min(failed, key=lambda reply: (_remoteness(reply), reply.at_s, reply.rank), default=None)


def _remoteness(reply: Reply) -> int:
    """0 for a cause, more for what only follows from another rank's failure."""
    if reply.outcome == "timed_out":
        return 2 if WAITING_FOR_PEERS in reply.detail else 1
    text = reply.detail.lower()  # the whole traceback: a subject may have wrapped the backend's exception
    return 3 if any(words in text for words in LOST_ITS_PEER) else 0
