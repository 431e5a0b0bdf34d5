"""An exception as text, whatever exception it is."""

from __future__ import annotations

import traceback

from equivtest import limits


def describe_exception(error: BaseException) -> tuple[str, str, str]:
    """(type name, text, traceback), each printable and of bounded length."""
    try:
        text = str(error)
    except Exception as second:  # the subject's __str__ may raise anything
        text = f"(its __str__ raised {type(second).__name__})"
    trace = "".join(traceback.format_exception(error))
    return type(error).__name__, clip(text), clip(trace)


def clip(text: str) -> str:
    """`text` as valid UTF-8, its middle left out where it exceeds limits.OUTPUT_CHARS."""
    text = text.encode("utf-8", "backslashreplace").decode()
    left_out = len(text) - limits.OUTPUT_CHARS
    if left_out <= 0:
        return text
    head = limits.OUTPUT_CHARS // 4
    tail = limits.OUTPUT_CHARS - head
    return f"{text[:head]}\n... {left_out} characters left out ...\n{text[-tail:]}"
