"""One cell of the matrix of faults: run it, and say what is wrong with how it ended."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from equivtest.base import limits
from equivtest.ranks.first_cause import first_cause
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.ranks.scratch import scratch_directories
from tests.programs.faults import MOMENTS, FaultCase

VISIT = "tests.programs.faults:visit"
_ALONE = [(2, (0,)), (2, (1,)), (3, (0,)), (3, (1,)), (3, (2,))]
_TOGETHER = [(2, (0, 1)), (3, (0, 1)), (3, (1, 2))]


@dataclass(frozen=True)
class Naming:
    """Expected report of a fault.

    Attributes:
        outcome: Outcome of the named rank; '' if the visit must pass.
        text: Pattern of its text; {culprit} and {peer} stand for ranks.
        peer: True if a peer of the culprit may be named.
    """

    outcome: str
    text: str
    peer: bool = False


NOTHING = Naming("", "")
PLACES = ("tests/programs/faults.py", "in _failed", "is stopped")
"""Texts of a silent rank: it is in the visit, or on a slow machine still reports its exception."""
LEAST_LIMIT_S = 1.0
LATE_S = 1.0  # beyond its limit, for a fault to be named
VISITS_PER_LIMIT = 50
"""Number of faultless visits within the limit of a visit that must time out: it must reach its fault before."""

NAMINGS = {
    "raises": Naming("raised", "the culprit's own words"),
    "raises_system_exit": Naming("raised", "SystemExit: 0"),
    "exits_0": Naming("lost", "exited with code 0"),
    "exits_3": Naming("lost", "exited with code 3"),
    "is_killed": Naming("lost", "killed by SIGKILL"),
    "crashes": Naming("lost", "killed by SIGSEGV(.|\n)*in crashes"),
    "lacks_memory": Naming("raised", "allocate memory"),
    "eats_memory": Naming("raised|lost", "MemoryError|exited with code 1|killed by SIG(KILL|ABRT|SEGV)"),
    "hangs": Naming("timed_out", r"rank.* {culprit}\b.* in hangs \(faults.py:\d+\)"),
    "hangs_in_c": Naming("timed_out", r"rank {culprit} is in hangs_in_c \(faults.py:\d+\)"),
    "is_stopped": Naming("timed_out", "the process is stopped"),
    "enters_alone": Naming(
        "timed_out",
        r"rank {culprit} is in all_gather_into_tensor \(faults.py:\d+ in enters_alone\)\nranks? .* answered",
    ),
    "enters_other": Naming(
        "timed_out", r"in different collectives: .*rank {culprit} in all_gather_into_tensor", peer=True
    ),
    "enters_longer": Naming("lost|timed_out", "all_reduce", peer=True),
    "skips_collective": Naming("timed_out", r"in all_reduce .*\nrank {culprit} has answered", peer=True),
    "answers_late": Naming("timed_out", "rank {culprit} is in answers_late"),
    "answers_twice": NOTHING,
    "floods": NOTHING,
    "floods_from_c": NOTHING,
}
AT_ONCE = ("raises", "exits_3", "is_killed", "crashes", "hangs")
"""Faults that two ranks also have at once."""


@dataclass(frozen=True)
class Cell:
    fault: str
    moment: str
    world_size: int
    culprits: tuple[int, ...]

    @property
    def column(self) -> str:
        return f"{self.world_size}:{'+'.join(map(str, self.culprits))}"

    @property
    def id(self) -> str:
        return f"{self.fault}-{self.moment}-{self.column}"


@dataclass(frozen=True)
class Result:
    """Result of a cell.

    Attributes:
        named: The cause in few words: 'rank 1 lost: killed by SIGKILL'.
        seconds: From the request to the replies.
        still_s: Seconds in which the machine stood still; measured only if there were too many.
        problems: Deviations from the expected report; none is a pass.
    """

    named: str
    seconds: float
    still_s: float
    problems: tuple[str, ...]


def cells() -> list[Cell]:
    return [
        Cell(fault, moment, world_size, culprits)
        for fault in NAMINGS
        for moment in MOMENTS
        for world_size, culprits in _ALONE + _TOGETHER * (fault in AT_ONCE)
    ]


def never(begun_s: float, ended_s: float) -> float:
    """A machine that does not stand still."""
    return 0.0


def run_cell(pool: Pool, cell: Cell, stood_still: Callable[[float, float], float] = never) -> Result:
    """Causes the fault in a working world, and checks all consequences.

    Args:
        stood_still: Seconds in which the machine stood still, between two readings of time.monotonic().
    """
    limit_s = limit_of(pool, cell)
    before, directories = _pids(pool, cell.world_size), _directories()
    case = FaultCase(
        world_size=cell.world_size, numel=2, culprits=cell.culprits, moment=cell.moment, late_s=limit_s + 0.3
    )
    begun_s = time.monotonic()
    replies = pool.run(cell.fault, case, limit_s=limit_s)
    seconds = time.monotonic() - begun_s
    cause = first_cause(replies)
    problems = _judge_naming(cell, cause) + _judge_stacks(cell, replies)
    still_s = stood_still(begun_s, begun_s + seconds) if seconds > limit_s + LATE_S else 0.0
    if seconds - still_s > limit_s + LATE_S:
        problems.append(f"took {seconds:.2f} s, {still_s:.2f} of them while the machine stood still")
    try:
        _pids(pool, cell.world_size)
    except AssertionError as error:
        problems.append(f"the next case does not pass: {error}")
    if cause is not None and (alive := [pid for pid in before if psutil.pid_exists(pid)]):
        problems.append(f"processes left: {alive}")
    problems += _judge_files(directories)
    if cell.fault == "floods":
        size = max(reply.answers[0].tensors["output"].local[1].item() for reply in replies if reply.answers)
        problems += [f"output grew to {size} bytes"] * (not 0 < size < 2**23)
    named = "-" if cause is None else f"rank {cause.rank} {cause.outcome}: {cause.error_text.strip()[:60]}"
    return Result(named, seconds, still_s, tuple(problems))


def limit_of(pool: Pool, cell: Cell) -> float:
    """Returns the time limit of a visit of the cell: short if it must time out, but longer on a slow machine."""
    if "timed_out" not in NAMINGS.get(cell.fault, NOTHING).outcome:
        return limits.CASE_S
    _pids(pool, cell.world_size)  # the world may have to start
    begun_s = time.monotonic()
    _pids(pool, cell.world_size)
    return max(LEAST_LIMIT_S, VISITS_PER_LIMIT * (time.monotonic() - begun_s))


def _pids(pool: Pool, world_size: int) -> set[int]:
    """The processes of a world in which a collective works."""
    replies = pool.run("nothing", FaultCase(world_size=world_size, numel=2, moment="after"))  # which waits for nothing
    assert all(reply.outcome == "answered" for reply in replies), replies
    return {int(reply.answers[0].tensors["output"].local[0].item()) for reply in replies}


def _judge_naming(cell: Cell, cause: Reply | None) -> list[str]:
    naming = NAMINGS[cell.fault]
    if cause is None or not naming.outcome:
        return [] if cause is None and not naming.outcome else [f"named {cause}, not {naming.outcome}"]
    problems = []
    if not naming.peer and cause.rank not in cell.culprits:
        problems.append(f"rank {cause.rank} is blamed")
    if not re.fullmatch(naming.outcome, cause.outcome):
        problems.append(f"named {cause.outcome}: {cause.error_text}")
    words = f"{cause.error_text}\n{cause.detail}"
    if not any(re.search(naming.text.replace("{culprit}", str(rank)), words) for rank in cell.culprits):
        problems.append(f"its words do not match {naming.text!r}: {words}")
    return problems


def _judge_stacks(cell: Cell, replies: Sequence[Reply]) -> list[str]:
    """Requires that every silent rank shows its place, or that it is stopped, except a rank that is about to end."""
    going = cell.culprits if NAMINGS[cell.fault].outcome == "lost" else ()
    silent = [reply for reply in replies if reply.outcome == "timed_out" and reply.rank not in going]
    return [
        f"no stacks of rank {reply.rank}: {reply.detail}"
        for reply in silent
        if not any(place in reply.detail for place in PLACES)
    ]


def _judge_files(before: Sequence[Path]) -> list[str]:
    """Requires as many directories as before, and no reply's file in them."""
    mine = _directories()
    files = [str(file) for path in mine for file in path.glob("reply-*")]
    return [f"files left: {files}"] * bool(files) + [f"directories left: {mine}"] * (len(mine) > len(before))


def _directories() -> list[Path]:
    """Lists the directories of this process, from any pool."""
    return [path for path in scratch_directories() if path.name.startswith(f"equivtest-{os.getpid()}-")]
