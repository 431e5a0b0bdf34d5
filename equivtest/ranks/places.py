"""Finds, from stacks and tracebacks, the line and the collective in which each rank was when a case failed."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from equivtest.ranks.reply import Reply

_FRAME = re.compile(r'^\s*File "(.+)", line (\d+),? in (\S+)', re.MULTILINE)
_BLOCKING = "torch/distributed/distributed_c10d.py"
_FUNCTIONAL = "torch/distributed/_functional_collectives.py"  # DTensor calls it; it blocks only in wait_tensor
_WRAPPERS = ("torch/distributed/c10d_logger.py", "typing_extensions.py", "contextlib.py", _BLOCKING)
_WORK_WAIT = re.compile(r"\.wait\(")  # waits for an async collective in C++, which leaves no frame
_PLURALS = {"rank": "ranks", "process": "processes"}
_VISIT_THREAD = "ranks/rank.py"


@dataclass(frozen=True)
class Place:
    """A line of code in which a rank was, and the collective that this line calls.

    Attributes:
        collective: The collective that the line calls, such as 'all_reduce'. It is 'wait_tensor' or 'wait' if the line
            waits for an asynchronous collective, and '' if the line calls no collective.
        line: The innermost line outside torch, such as 'file.py:12'.
        function: Name of the function that contains the line.
    """

    collective: str
    line: str
    function: str

    def __str__(self) -> str:
        if self.collective:
            return f"{self.collective} ({self.line} in {self.function})"
        return f"{self.function} ({self.line})"


def place_of(detail: str) -> Place | None:
    """Returns the line at which faulthandler's stacks or a traceback end, or None if `detail` has neither."""
    frames = _frames(detail)
    if not frames:
        return None
    index = next((index for index, (file, _, _) in enumerate(frames) if file.endswith((_BLOCKING, _FUNCTIONAL))), None)
    if index is None:
        file, line, _ = frames[0]
        collective = "wait" if _WORK_WAIT.search(linecache.getline(file, line)) else ""
        index = 0
    elif frames[index][0].endswith(_FUNCTIONAL):
        collective = frames[index][2]
    else:
        while index + 1 < len(frames) and frames[index + 1][0].endswith(_WRAPPERS):
            index += 1
        collective = next(name for file, _, name in frames[index::-1] if file.endswith(_BLOCKING))
    outside = (frame for frame in frames[index:] if "/torch/" not in frame[0] and not frame[0].endswith(_WRAPPERS))
    file, line, function = next(outside, frames[index])
    return Place(collective, f"{Path(file).name}:{line}", function)


def _frames(detail: str) -> list[tuple[str, int, str]]:
    """Returns (file, line, function) of each frame of the subject's thread, the innermost frame first."""
    if "(most recent call first)" in detail:
        threads = [thread for thread in detail.split("\n\n") if "(most recent call first)" in thread]
        thread = next((thread for thread in threads if _VISIT_THREAD in thread), threads[0])
        found = _FRAME.findall(thread)
    else:
        found = _FRAME.findall(detail)[::-1]
    return [(file, int(line), function) for file, line, function in found]


def describe_places(replies: Sequence[Reply], noun: str = "rank") -> str:
    """Returns text on the lines of code in which ranks hang, or in which they were when they lost their peers.

    The text is '' if no line is known. If every rank is in a collective, but not all are in the same collective, the
    first line of the text says so.

    Args:
        noun: 'rank', or 'process' if the ranks of a mesh have other numbers than the replies.
    """
    places = {reply.rank: place for reply in replies if (place := _place_in_failure(reply))}
    lines = []
    collectives = {rank: place.collective for rank, place in places.items() if place.collective}
    known = not {"wait", "wait_tensor"} & set(collectives.values())
    if len(collectives) == len(replies) and known and len(set(collectives.values())) > 1:
        each = ", ".join(f"{noun} {rank} in {collective}" for rank, collective in sorted(collectives.items()))
        lines.append(f"{_PLURALS[noun]} are in different collectives: {each}")
    hanging = {reply.rank for reply in replies if reply.outcome == "timed_out"}
    for place in dict.fromkeys(places.values()):
        for verbs, group in (
            (("is in", "are in"), [rank for rank in places if places[rank] == place and rank in hanging]),
            (("was in", "were in"), [rank for rank in places if places[rank] == place and rank not in hanging]),
        ):
            if group:
                lines.append(f"{_name(group, noun)} {verbs[len(group) > 1]} {place}")
    answered = [reply.rank for reply in replies if reply.outcome == "answered"]
    if hanging and answered:
        lines.append(f"{_name(answered, noun)} {'have' if len(answered) > 1 else 'has'} answered")
    return "\n".join(lines)


def _place_in_failure(reply: Reply) -> Place | None:
    if reply.outcome not in ("timed_out", "lost", "raised"):
        return None
    place = place_of(reply.detail)
    return place if place is not None and (place.collective or reply.outcome == "timed_out") else None


def _name(ranks: Sequence[int], noun: str) -> str:
    return f"{_PLURALS[noun] if len(ranks) > 1 else noun} {', '.join(map(str, sorted(ranks)))}"
