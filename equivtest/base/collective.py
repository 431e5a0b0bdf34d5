"""Defines a collective as plain data, which a rank has called or a library documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

PHASES = ("forward", "backward")
"""Phases of a step. 'forward' is everything outside a backward, including preparation of the module."""


@dataclass(frozen=True)
class Collective:
    """One call of a collective by one rank.

    Attributes:
        kind: 'all_reduce', 'all_gather', 'reduce_scatter', 'all_to_all', 'broadcast', 'scatter',
            'barrier', ...
        size_bytes: Size of this rank's operand with its padding. For a barrier the size is 0. For a scatter the size is
            0 on all ranks except the source.
        phase: One of PHASES.
        group: The processes that take part: 'mesh' for all processes of the mesh, otherwise a list such as
            'processes 0, 1, 2'.
        is_unchanged: True if an audit planted a fault in the call, and this rank's results are right all the same.
    """

    kind: str
    size_bytes: int
    phase: str = "forward"
    group: str = "mesh"
    is_unchanged: bool = False

    def __str__(self) -> str:
        text = f"{self.phase} {self.kind} of {self.size_bytes:,} bytes"
        return text if self.group == "mesh" else f"{text} on {self.group}"


def describe(collectives: Iterable[Collective]) -> str:
    """Lists the collectives as text and counts equal collectives: '2 x forward all_gather of 8 bytes', or 'none'."""
    counts = Counter(map(str, collectives))
    return "; ".join(f"{count} x {text}" if count > 1 else text for text, count in counts.items()) or "none"
