"""Which rank is to blame."""

from __future__ import annotations

from equivtest.ranks.first_cause import first_cause
from equivtest.ranks.reply import Reply

LOST_PEER = Reply(0, "raised", (), "RuntimeError", "closed", "RuntimeError: Connection closed by peer [::1]", 1.0)
OWN = Reply(1, "raised", (), "ValueError", "mine", "ValueError: mine", 2.0)
KILLED = Reply(2, "lost", (), "", "killed by SIGKILL", "killed by SIGKILL", 3.0)
WAITING = Reply(3, "timed_out", detail='File "/x/torch/distributed/distributed_c10d.py", line 1 in gather', at_s=0.5)
WAITING_FOR_TENSOR = Reply(
    3, "timed_out", detail='File "/x/torch/distributed/_functional_collectives.py", line 1 in wait_tensor', at_s=0.5
)
LOOPING = Reply(4, "timed_out", detail='File "/x/mine.py", line 1 in loop', at_s=0.6)
FINE = Reply(5, "answered", at_s=0.1)


def test_nobody_is_blamed_without_a_failure() -> None:
    """Ranks that answered, or could not be asked, are no cause."""
    assert first_cause([FINE, Reply(0, "not_supported"), Reply(1, "not_in_mesh")]) is None


def test_the_first_of_those_that_failed_by_themselves_counts() -> None:
    """Of two ranks with reasons of their own the earlier one is the cause."""
    assert first_cause([FINE, LOST_PEER, KILLED, OWN, WAITING]) is OWN


def test_a_rank_that_lost_its_peer_comes_last() -> None:
    """However early a survivor spoke, a lost or looping rank is the likelier cause."""
    assert first_cause([LOST_PEER, KILLED]) is KILLED
    assert first_cause([LOST_PEER, LOOPING]) is LOOPING
    assert first_cause([LOST_PEER, FINE]) is LOST_PEER


def test_a_rank_that_raised_comes_before_those_that_wait() -> None:
    """A subject may raise 'broken pipe' of its own, while its peers do nothing but wait for it."""
    assert first_cause([WAITING, LOST_PEER]) is LOST_PEER


def test_of_silent_ranks_the_one_outside_a_collective_counts() -> None:
    """Ranks that wait in a collective wait for the one that does not."""
    assert first_cause([WAITING, LOOPING]) is LOOPING
    assert first_cause([WAITING_FOR_TENSOR, LOOPING]) is LOOPING
