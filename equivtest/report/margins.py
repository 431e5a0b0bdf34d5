"""Counts margins, the errors of floating-point values as fractions of the allowed errors, per tensor and dtype.

A margin is the largest error in one tensor of one draw, divided by the error that is allowed at that element.  A margin
close to 1 shows that the bound is sharp.  If all margins are far below 1, the bound is loose. Then equivtest does not
find a wrong program whose errors are larger than the errors of a correct program, but below the bound.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

LOWEST_BIN = -10  # of the histogram: margins up to 2**-10, without zero
BINS = tuple(range(LOWEST_BIN, 1))
Key = tuple[str, str]
"""(name of a tensor, name of a dtype)."""


@dataclass
class Margins:
    """Counts the margins of one tensor in one dtype, over draws of values.

    Attributes:
        bins: b -> number of draws with a margin above 2**(b - 1) and up to 2**b. Margins of 0 and failures are not in
            any bin.
    """

    draws: int = 0
    zeros: int = 0
    beyond: int = 0
    largest: float = 0.0
    total: float = 0.0
    bins: Counter[int] = field(default_factory=Counter)

    def add(self, margin: float) -> None:
        """Counts the margin of one draw.

        A margin above 1 is a failure. It counts in `beyond` and `largest`, but neither in the mean nor in `bins`.
        """
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
        """Mean margin of the draws within their bounds."""
        return self.total / max(1, self.draws - self.beyond)


def merged(tables: Iterable[Mapping[Key, Margins]]) -> dict[Key, Margins]:
    """Adds up the counts of several tables, for each tensor and dtype."""
    found: defaultdict[Key, Margins] = defaultdict(Margins)
    for table in tables:
        for key, margins in table.items():
            found[key].merge(margins)
    return dict(sorted(found.items()))


HEAD = ("tensor", "dtype", "draws", "largest", "mean", ">1", "=0", *(f"2^{b}" for b in BINS))
"""Titles of the table's columns; those after '=0' are the upper ends of the histogram's bins."""
NUM_PLAIN = len(HEAD) - len(BINS)
"""Columns before the histogram."""


def rows(table: Mapping[Key, Margins]) -> list[Sequence[str]]:
    """Returns one row of text for each tensor and dtype of the table. `HEAD` has the titles of the columns."""
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
