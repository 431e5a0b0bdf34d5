"""Names of tensors of one of several forwards of a captured run, whose gradients add up."""

from __future__ import annotations

import re

_MICRO_BATCH = re.compile(r"micro(\d+)\.")


def at_micro_batch(number: int, name: str) -> str:
    """Converts a name of the first micro-batch to another: at_micro_batch(2, 'given.ids') == 'micro2.given.ids'."""
    return name if number == 1 else f"micro{number}.{name}"


def split_micro_batch(name: str) -> tuple[int, str]:
    """Splits a name into the number of its micro-batch, from 1, and its name in the first: (2, 'given.ids')."""
    match = _MICRO_BATCH.match(name)
    return (1, name) if match is None else (int(match[1]), name[match.end() :])
