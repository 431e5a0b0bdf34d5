"""Names the tensors of each micro-batch of a captured run.

The tensor 'x' of the first micro-batch has the name 'micro2.x' in the second.
"""

from __future__ import annotations

import re

_MICRO_BATCH = re.compile(r"micro(\d+)\.")


def at_micro_batch(number: int, name: str) -> str:
    return name if number == 1 else f"micro{number}.{name}"


def split_micro_batch(name: str) -> tuple[int, str]:
    """Splits a name into the number of its micro-batch, from 1, and the tensor's name in the first micro-batch."""
    match = _MICRO_BATCH.match(name)
    return (1, name) if match is None else (int(match[1]), name[match.end() :])
