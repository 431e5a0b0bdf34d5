"""Counts the combinations of values that a run has covered, over all searches of a property."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from equivtest.report.columns import aligned
from equivtest.report.handover import Coverage

Value = tuple[str, str]
"""An axis and its value, in words."""

Combination = tuple[str, tuple[Value, ...]]
"""The array's name, and values of different axes."""


@dataclass
class Covered:
    """Counts the combinations of a property.

    Attributes:
        strength: How many axes are combined; 0 if random cases are all there is.
        judged: Combinations of cases with a conclusion.
        known: Combinations of cases that torch is known to get wrong.
        open: Combinations of cases without a conclusion.
        infeasible: Combinations that no case can have.
        axes: Names of the axes, in the order in which they are drawn.
    """

    strength: int = 0
    judged: set[Combination] = field(default_factory=set)
    known: set[Combination] = field(default_factory=set)
    open: set[Combination] = field(default_factory=set)
    infeasible: set[Combination] = field(default_factory=set)
    axes: dict[str, None] = field(default_factory=dict)

    def add(self, coverage: Coverage) -> None:
        """Adds the rows of one search; a combination counts once, as judged rather than known or open."""
        self.strength = coverage.strength
        for row in coverage.rows:
            self.axes |= dict.fromkeys(name for name, _ in row.values)
            getattr(self, row.state).update(self._combinations(coverage.array, row.values))
        self.infeasible.update((coverage.array, tuple(sorted(each))) for each in coverage.infeasible)
        self.known -= self.judged
        self.open -= self.judged | self.known

    def _combinations(self, array: str, values: Iterable[Value]) -> Iterator[Combination]:
        return ((array, each) for each in itertools.combinations(sorted(values), self.strength))

    @property
    def text(self) -> str:
        """Says how many combinations are covered, known to fail, open and infeasible; '' without an array."""
        if not self.strength:
            return ""
        what = {1: "values", 2: "pairs of values"}.get(self.strength, f"combinations of {self.strength} values")
        known = f", {len(self.known):,} known to fail" * bool(self.known)
        left = f", {len(self.open):,} open" * bool(self.open)
        return f"{len(self.judged):,} {what} covered{known}{left}, {len(self.infeasible):,} infeasible"

    @staticmethod
    def all_of(parts: Iterable[Covered]) -> str:
        """Returns the same of several properties together."""
        parts = [part for part in parts if part.strength]
        if not parts:
            return ""
        counts = {
            "covered": sum(len(part.judged) for part in parts),
            "known to fail": sum(len(part.known) for part in parts),
            "open": sum(len(part.open) for part in parts),
            "infeasible": sum(len(part.infeasible) for part in parts),
        }
        words = ", ".join(f"{count:,} {word}" for word, count in counts.items() if count)
        return f"{'pairs of values' if parts[0].strength == 2 else 'values'}: {words}"

    def matrix(self) -> list[tuple[str, list[str]]]:
        """Returns a row for each axis: how many of its pairs with each earlier axis are covered, of those feasible."""
        if self.strength != 2:
            return []
        judged, left = (_by_axes(pairs) for pairs in (self.judged, self.known | self.open))
        rows = []
        for number, name in enumerate(self.axes):
            pairs = [frozenset((name, other)) for other in [*self.axes][:number]]
            rows.append((name, [_share(judged.get(pair, 0), left.get(pair, 0)) for pair in pairs]))
        return rows


def _by_axes(combinations: Iterable[Combination]) -> dict[frozenset[str], int]:
    counts: dict[frozenset[str], int] = {}
    for _, combination in combinations:
        key = frozenset(name for name, _ in combination)
        counts[key] = counts.get(key, 0) + 1
    return counts


def _share(judged: int, left: int) -> str:
    return f"{judged}/{judged + left}" if left else str(judged)


def table(rows: Sequence[tuple[str, int, Covered]]) -> list[str]:
    """Returns lines: for each property its cases, and what they cover."""
    head = ("property", "cases", "covered", "known", "open", "infeasible")
    lines = [
        (name, str(cases), *(f"{len(part):,}" for part in (found.judged, found.known, found.open, found.infeasible)))
        for name, cases, found in rows
    ]
    return aligned([head, *lines])
