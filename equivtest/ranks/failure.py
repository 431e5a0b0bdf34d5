"""Describes an exception by its type, its message and a shortened traceback, each as text of bounded length."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterable
from pathlib import Path

from equivtest.base import limits

HARNESS = (Path(__file__).parent, Path(__file__).parents[1] / "programs")
"""Folders of the harness; tracebacks leave out the frames of their files."""
WRAPPERS = ("_wrapped_call_impl", "_call_impl")
"""Methods of nn.Module that only pass a call on to `forward`; source: torch/nn/modules/module.py (2.13.0)."""

COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
"""Files with the functions that call collectives, see `equivtest.ranks.places`."""


def describe_exception(error: BaseException) -> tuple[str, str, str]:
    """Returns (type name, text, traceback), each printable and of bounded length."""
    try:
        text = str(error)
    except Exception as second:  # the subject's __str__ may raise anything
        text = f"(its __str__ raised {type(second).__name__})"
    return type(error).__name__, clip(text), clip(_trace_of(error))


def _trace_of(error: BaseException) -> str:
    trace = traceback.TracebackException.from_exception(error)
    links: list[traceback.TracebackException | None] = [trace]
    while links:
        link = links.pop()
        if link is not None:
            link.stack = _shortened(link.stack)
            links += [link.__cause__, None if link.__suppress_context__ else link.__context__]
    return "".join(trace.format())


def _shortened(stack: Iterable[traceback.FrameSummary]) -> traceback.StackSummary:
    """Keeps, of consecutive torch frames, only the first, the last and calls of collectives."""
    stack = list(stack)
    frames = [frame for frame in stack if not _is_passed_on(frame)] or stack
    kept = []
    for inside, run in itertools.groupby(frames, lambda frame: "/torch/" in frame.filename):
        group = list(run)
        ends = {id(group[0]), id(group[-1])}
        shown = [frame for frame in group if not inside or id(frame) in ends or frame.filename.endswith(COLLECTIVES)]
        for frame in shown:
            first = frame is group[0] and len(shown) < len(group)
            more = f"  (left out: {len(group) - len(shown)} more of torch)" if first else ""
            kept.append(traceback.FrameSummary(frame.filename, frame.lineno, frame.name + more))
    return traceback.StackSummary.from_list(kept)


def _is_passed_on(frame: traceback.FrameSummary) -> bool:
    return any(folder in Path(frame.filename).parents for folder in HARNESS) or frame.name in WRAPPERS


def in_one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limits.REASON_CHARS else f"{line[: limits.REASON_CHARS - 3]}..."


def clip(text: str, num_chars: int = limits.OUTPUT_CHARS) -> str:
    """Returns `text` as valid UTF-8, without its middle if it exceeds `num_chars` characters."""
    text = text.encode("utf-8", "backslashreplace").decode()
    left_out = len(text) - num_chars
    if left_out <= 0:
        return text
    head = num_chars // 4
    tail = num_chars - head
    return f"{text[:head]}\n... {left_out} characters left out ...\n{text[-tail:]}"
