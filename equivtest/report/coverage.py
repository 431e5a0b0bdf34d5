"""Counts which combinations of values of the cases' axes a run has covered, per property."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from equivtest.report.columns import aligned
from equivtest.report.handover import Coverage

Value = tuple[str, str]
"""(axis from which cases are drawn, a case's value on this axis as text)."""

Combination = tuple[str, tuple[Value, ...]]
"""Name of the covering array, and one value of each of several axes."""


@dataclass
class Covered:
    """Combinations of axis values that occur in the cases of one property, sorted by the results of the cases.

    Attributes:
        strength: Number of axes that a combination has. It is 0 if the property has only random cases.
        judged: Combinations that occur in a case with a conclusion.
        known: Combinations that occur in no case with a conclusion, but in at least one known failure.
        open: Combinations that occur in no case with a conclusion and in no known failure.
        infeasible: Combinations that no case can have.
    """

    strength: int = 0
    judged: set[Combination] = field(default_factory=set)
    known: set[Combination] = field(default_factory=set)
    open: set[Combination] = field(default_factory=set)
    infeasible: set[Combination] = field(default_factory=set)
    axes: dict[str, None] = field(default_factory=dict)

    def add(self, coverage: Coverage) -> None:
        """Adds the combinations of one search's cases.

        If several cases have the same combination, the best state of these cases counts: judged, then known, then open.
        """
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
        """Text such as '40 pairs of values covered, 2 open, 3 infeasible', or '' without a covering array."""
        if not self.strength:
            return ""
        what = {1: "values", 2: "pairs of values"}.get(self.strength, f"combinations of {self.strength} values")
        known = f", {len(self.known):,} known to fail" * bool(self.known)
        left = f", {len(self.open):,} open" * bool(self.open)
        return f"{len(self.judged):,} {what} covered{known}{left}, {len(self.infeasible):,} infeasible"

    @staticmethod
    def all_of(parts: Iterable[Covered]) -> str:
        """Adds up several properties and returns text such as 'pairs of values: 80 covered, 3 infeasible', or ''."""
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
        """Returns how many pairs of values are covered for each two axes, as (axis, one cell for each earlier axis).

        The cell '5/6' means that 5 of 6 feasible pairs are covered. '6' means that all 6 are.  The result is [] unless
        combinations have two axes.
        """
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
    head = ("property", "cases", "covered", "known", "open", "infeasible")
    lines = [
        (name, str(cases), *(f"{len(part):,}" for part in (found.judged, found.known, found.open, found.infeasible)))
        for name, cases, found in rows
    ]
    return aligned([head, *lines])
