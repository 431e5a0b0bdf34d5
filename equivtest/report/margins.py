"""Counts margins per tensor and dtype.

A margin is the largest error in one tensor of one draw, divided by the allowed error at that element.  If all margins
are far below 1, the bound is loose: an error of a wrong program may stay below it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

LOWEST_BIN = -10  # of the histogram: margins up to 2**-10, without zero
BINS = tuple(range(LOWEST_BIN, 1))
Key = tuple[str, str]


@dataclass
class Margins:
    """Counts the margins of one tensor in one dtype, over draws of values.

    Attributes:
        beyond: Number of margins above 1. Such a margin is a failure, and counts neither in the mean nor in `bins`.
        bins: b -> number of draws with a margin above 2**(b - 1) and up to 2**b. A margin of 0 is in no bin.
    """

    draws: int = 0
    zeros: int = 0
    beyond: int = 0
    largest: float = 0.0
    total: float = 0.0
    bins: Counter[int] = field(default_factory=Counter)

    def add(self, margin: float) -> None:
        self.draws += 1
        self.largest = max(self.largest, margin)
        if margin > 1:
            self.beyond += 1
            return
        self.total += margin
        if margin == 0:
            self.zeros += 1
        else:
            self.bins[max(LOWEST_BIN, math.ceil(math.log2(margin)))] += 1

    def merge(self, other: Margins) -> None:
        self.draws += other.draws
        self.zeros += other.zeros
        self.beyond += other.beyond
        self.largest = max(self.largest, other.largest)
        self.total += other.total
        self.bins += other.bins

    @property
    def mean(self) -> float:
        return self.total / max(1, self.draws - self.beyond)


def merged(tables: Iterable[Mapping[Key, Margins]]) -> dict[Key, Margins]:
    found: defaultdict[Key, Margins] = defaultdict(Margins)
    for table in tables:
        for key, margins in table.items():
            found[key].merge(margins)
    return dict(sorted(found.items()))


HEAD = ("tensor", "dtype", "draws", "largest", "mean", ">1", "=0", *(f"2^{b}" for b in BINS))
"""Titles of the table's columns.  The titles after '=0' are the upper ends of the histogram's bins."""
NUM_PLAIN = len(HEAD) - len(BINS)
"""Number of columns before the histogram."""


def rows(table: Mapping[Key, Margins]) -> list[Sequence[str]]:
    return [
        (
            name,
            dtype,
            f"{margins.draws:,}",
            f"{margins.largest:.3g}",
            f"{margins.mean:.3g}",
            *(str(count or "-") for count in (margins.beyond, margins.zeros, *(margins.bins[b] for b in BINS))),
        )
        for (name, dtype), margins in table.items()
    ]
