"""The place of a rank, from its stacks or its traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from equivtest.ranks.places import describe_places, place_of
from equivtest.ranks.reply import Outcome, Reply

C10D = "/x/site-packages/torch/distributed/distributed_c10d.py"
FUNCTIONAL = "/x/site-packages/torch/distributed/_functional_collectives.py"


def stacks(*frames: tuple[str, str]) -> str:
    """Writes stacks like faulthandler, innermost first; every frame is on line 7."""
    lines = [f'  File "{file}", line 7 in {function}' for file, function in frames]
    return "\n".join(
        ["Current thread 0x1 (most recent call first):", *lines, '  File "/h/ranks/rank.py", line 9 in work']
    )


IN_ALL_REDUCE = stacks((C10D, "all_reduce"), ("/x/torch/distributed/c10d_logger.py", "wrapper"), ("/u/mine.py", "f"))
IN_ALL_GATHER = stacks(
    (C10D, "all_gather_single"),
    ("/x/torch/distributed/c10d_logger.py", "wrapper"),
    (C10D, "all_gather_into_tensor"),
    ("/x/typing_extensions.py", "wrapper"),
    ("/u/mine.py", "g"),
)
IN_WAIT = stacks((FUNCTIONAL, "wait_tensor"), (FUNCTIONAL, "wait"), ("/x/torch/nn/module.py", "call"), ("/u/m.py", "h"))
LOOPING = stacks(("/u/mine.py", "loops"))
RAISED = (
    'Traceback (most recent call last):\n  File "/u/mine.py", line 7, in f\n  File "'
    + C10D
    + '", line 1, in barrier\nE: x'
)


@pytest.mark.parametrize(
    ("detail", "place"),
    [
        (IN_ALL_REDUCE, "all_reduce (mine.py:7 in f)"),
        (IN_ALL_GATHER, "all_gather_into_tensor (mine.py:7 in g)"),
        (IN_WAIT, "wait_tensor (m.py:7 in h)"),
        (LOOPING, "loops (mine.py:7)"),
        (RAISED, "barrier (mine.py:7 in f)"),
        ('Thread 0x2 (most recent call first):\n  File "/o.py", line 1 in other\n\n' + LOOPING, "loops (mine.py:7)"),
        ("killed by SIGKILL", "None"),
    ],
)
def test_place_of_a_rank_is_its_collective_and_the_calling_user_line(detail: str, place: str) -> None:
    """The public name of the collective, and the innermost line outside torch."""
    assert str(place_of(detail)) == place


def test_rank_in_work_wait_is_reported_with_the_line_that_calls_it(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("\n" * 6 + "    work.wait()\n")
    assert str(place_of(stacks((str(source), "f")))) == "wait (source.py:7 in f)"


def reply(rank: int, outcome: Outcome, detail: str = "") -> Reply:
    return Reply(rank=rank, outcome=outcome, detail=detail)


def test_message_has_one_line_for_ranks_that_wait_at_one_place() -> None:
    replies = [reply(0, "timed_out", IN_WAIT), reply(1, "answered"), reply(2, "timed_out", IN_WAIT)]
    assert describe_places(replies) == "ranks 0, 2 are in wait_tensor (m.py:7 in h)\nrank 1 has answered"


def test_message_begins_with_the_mismatch_if_ranks_are_in_different_collectives() -> None:
    mismatch = "ranks are in different collectives: rank 0 in all_reduce, rank 1 in all_gather_into_tensor"
    both = [reply(0, "lost", IN_ALL_REDUCE), reply(1, "timed_out", IN_ALL_GATHER)]
    assert describe_places(both).splitlines()[0] == mismatch
    assert "rank 0 was in all_reduce (mine.py:7 in f)" in describe_places(both)


@pytest.mark.parametrize(
    "third", [reply(2, "timed_out", LOOPING), reply(2, "timed_out", IN_WAIT), reply(2, "lost", "killed by SIGKILL")]
)
def test_mismatch_of_collectives_is_reported_only_if_every_rank_is_in_one(third: Reply) -> None:
    replies = [reply(0, "timed_out", IN_ALL_REDUCE), reply(1, "timed_out", IN_ALL_GATHER), third]
    assert "different" not in describe_places(replies)


def test_rank_that_raised_outside_a_collective_is_left_out_of_the_places() -> None:
    assert describe_places([reply(0, "raised", LOOPING), reply(1, "answered")]) == ""
