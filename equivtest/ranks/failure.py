"""An exception as text, whatever exception it is."""

from __future__ import annotations

import traceback
from pathlib import Path

from equivtest import limits

HARNESS = Path(__file__).parent
"""Frames of files here are the harness's: they say nothing about the subject."""


def describe_exception(error: BaseException) -> tuple[str, str, str]:
    """(type name, text, traceback), each printable and of bounded length."""
    try:
        text = str(error)
    except Exception as second:  # the subject's __str__ may raise anything
        text = f"(its __str__ raised {type(second).__name__})"
    return type(error).__name__, clip(text), clip(_trace_of(error))


def _trace_of(error: BaseException) -> str:
    """The traceback without the harness's own frames and without marks under the lines."""
    trace = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in trace.stack if Path(frame.filename).parent != HARNESS]
    plain = [traceback.FrameSummary(frame.filename, frame.lineno, frame.name) for frame in frames]
    if plain:
        trace.stack = traceback.StackSummary.from_list(plain)
    return "".join(trace.format())


def clip(text: str) -> str:
    """`text` as valid UTF-8, its middle left out where it exceeds limits.OUTPUT_CHARS."""
    text = text.encode("utf-8", "backslashreplace").decode()
    left_out = len(text) - limits.OUTPUT_CHARS
    if left_out <= 0:
        return text
    head = limits.OUTPUT_CHARS // 4
    tail = limits.OUTPUT_CHARS - head
    return f"{text[:head]}\n... {left_out} characters left out ...\n{text[-tail:]}"
