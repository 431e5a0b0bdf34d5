"""Names the tensors of each micro-batch of a captured run: 'x' of the first, 'micro2.x' of the second."""

from __future__ import annotations

import re

_MICRO_BATCH = re.compile(r"micro(\d+)\.")


def at_micro_batch(number: int, name: str) -> str:
    """Returns a tensor's name in another micro-batch than the first: (2, 'given.ids') -> 'micro2.given.ids'."""
    return name if number == 1 else f"micro{number}.{name}"


def split_micro_batch(name: str) -> tuple[int, str]:
    """Splits a name into its micro-batch, from 1, and its name in the first: 'micro2.given.ids' -> (2, 'given.ids')."""
    match = _MICRO_BATCH.match(name)
    return (1, name) if match is None else (int(match[1]), name[match.end() :])
