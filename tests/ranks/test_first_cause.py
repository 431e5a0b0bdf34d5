"""The rank that caused a failure."""

from __future__ import annotations

from equivtest.ranks.first_cause import first_cause
from equivtest.ranks.reply import Reply

LOST_PEER = Reply(
    rank=0,
    outcome="raised",
    error_type="RuntimeError",
    error_text="closed",
    detail="RuntimeError: Connection closed by peer [::1]",
    at_s=1.0,
)
OWN = Reply(rank=1, outcome="raised", error_type="ValueError", error_text="mine", detail="ValueError: mine", at_s=2.0)
KILLED = Reply(rank=2, outcome="lost", error_text="killed by SIGKILL", detail="killed by SIGKILL", at_s=3.0)
WAITING = Reply(
    rank=3, outcome="timed_out", detail='File "/x/torch/distributed/distributed_c10d.py", line 1 in gather', at_s=0.5
)
WAITING_FOR_TENSOR = Reply(
    rank=3,
    outcome="timed_out",
    detail='File "/x/torch/distributed/_functional_collectives.py", line 1 in wait_tensor',
    at_s=0.5,
)
LOOPING = Reply(rank=4, outcome="timed_out", detail='File "/x/mine.py", line 1 in loop', at_s=0.6)
FINE = Reply(rank=5, outcome="answered", at_s=0.1)


def test_first_cause_is_none_if_no_rank_failed() -> None:
    assert first_cause([FINE, Reply(rank=0, outcome="not_supported"), Reply(rank=1, outcome="not_in_mesh")]) is None


def test_first_cause_is_the_earliest_rank_that_failed_by_itself() -> None:
    assert first_cause([FINE, LOST_PEER, KILLED, OWN, WAITING]) is OWN


def test_first_cause_is_a_lost_or_looping_rank_rather_than_its_peer() -> None:
    assert first_cause([LOST_PEER, KILLED]) is KILLED
    assert first_cause([LOST_PEER, LOOPING]) is LOOPING
    assert first_cause([LOST_PEER, FINE]) is LOST_PEER


def test_first_cause_is_a_rank_that_raised_rather_than_a_rank_that_waits() -> None:
    """A subject may raise its own 'broken pipe', while its peers only wait for it."""
    assert first_cause([WAITING, LOST_PEER]) is LOST_PEER


def test_first_cause_is_a_silent_rank_outside_a_collective() -> None:
    assert first_cause([WAITING, LOOPING]) is LOOPING
    assert first_cause([WAITING_FOR_TENSOR, LOOPING]) is LOOPING
