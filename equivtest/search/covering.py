"""Builds covering arrays: few cases in which every combination of values of any two, or any three, axes occurs.

The builder is greedy, like AETG (Cohen, Dalal, Fredman, Patton, "The AETG System", IEEE Transactions on Software
Engineering 23, 1997).  A row is one case.  For each row the builder chooses a combination that no row has yet, and
tries several cases with it; in half of them every other axis takes the value that adds the most new combinations.  The
case with the most new combinations becomes the row.  At the end the builder looks for one case that can replace two
rows.  The family's own function builds each tried case from its tables, so that every row is a valid case.  A
combination that occurs in no tried case counts as infeasible.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

from equivtest.cases.axes import Draw, Label, free, itself
from equivtest.cases.case import Case, fields_of
from equivtest.errors import Misuse
from equivtest.property import Space

T = TypeVar("T")
Value = tuple[str, Hashable]
"""(name of an axis, class of the entry that a case takes from the axis's table)."""

Combination = tuple[Value, ...]
"""Values of different axes, in the order in which the builder first met the axes."""

Build = Callable[[Draw, Space], Case]

SAMPLES = 300
"""Number of random cases from which the builder learns which axes and values there are."""
TRIES = 10
"""Number of cases that are tried for a combination; every second one is random on the other axes."""
MERGES = 5
"""Number of cases that are tried in place of two rows."""
EXPECTED = 15.0
"""Evidence that a combination is infeasible: so many random cases should have it, by its values' frequencies.

It is infeasible only if none has it.
"""


class CoveringRow(NamedTuple):
    """One case of a covering array.

    Attributes:
        values: The value of each axis, in the order in which they were picked.
        choices: (axis, index of the entry) of each pick from a table of several entries, in order.
    """

    case: Case
    values: Combination
    choices: tuple[tuple[str, int], ...]


class Array(NamedTuple):
    """A covering array: few cases in which every feasible combination of values of any `strength` axes occurs.

    Attributes:
        rows: Its cases; the first ones cover the most combinations.
        covered: The combinations that some case has.
        infeasible: The combinations that no tried case had.
    """

    rows: tuple[CoveringRow, ...]
    covered: tuple[Combination, ...]
    infeasible: tuple[Combination, ...]


def covering_array(build: Build, space: Space, strength: int, seed: int, dangerous: Iterable[str] = ()) -> Array:
    """Builds a covering array: cases in which every feasible combination of values of any `strength` axes occurs.

    The same arguments give the same array in every process.

    Args:
        build: The family's function that builds a case from its tables.
        dangerous: Names of axes; every combination of values of any three of them occurs too.
    """
    return _Builder(build, space, strength, tuple(dangerous), random.Random(seed)).array()


Rate = Callable[[Value, Iterable[Value]], int]


class _Row:
    """Chooses, for one tried case, the entry of each table from which the family picks.

    An axis in the combination `wanted` gets the value that it has there. Any other axis gets the value to which the
    function `rate` gives the highest number, or a random value if there is no such function.
    """

    def __init__(self, chance: random.Random, wanted: Combination, rate: Rate | None) -> None:
        self.chance, self.wanted, self.rate = chance, dict(wanted), rate
        self.values: dict[str, Hashable] = {}
        self.picks: dict[str, tuple[tuple[Any, ...], Label]] = {}
        self.choices: list[tuple[str, int]] = []

    def pick(self, name: str, entries: Sequence[T], label: Label = itself) -> T:
        table = tuple(entries)
        if label is free:
            index = self.chance.randrange(len(table))
        else:
            classes = _classes(table, tuple(map(type, table)), label)
            self.values[name] = value = self._value(name, classes)
            self.picks[name] = table, label
            index = self.chance.choice(classes[value])
        if len(table) > 1:
            self.choices.append((name, index))
        return table[index]

    def _value(self, name: str, classes: Mapping[Hashable, tuple[int, ...]]) -> Hashable:
        if self.wanted.get(name, free) in classes:
            return self.wanted[name]
        best = list(classes)
        if self.rate is not None:
            rates = [self.rate((name, value), self.values.items()) for value in classes]
            best = [value for value, rate in zip(classes, rates, strict=True) if rate == max(rates)]
        return self.chance.choice(best)

    def values_of(self, case: Case) -> Combination:
        """Returns the values that the case has; the family may have corrected a field after it was picked."""
        fields = fields_of(case)
        return tuple(
            (name, value if name not in fields else self._corrected(name, fields[name]))
            for name, value in self.values.items()
            if name not in fields or self._corrected(name, fields[name]) is not free
        )

    def _corrected(self, name: str, actual: Any) -> Hashable:
        """Returns the label of the value that field `name` has in the case.

        The family may have changed the field after its value was picked. If the field's table lacks the new value, the
        result is `free`, so that the axis does not count. If no entry of the table has the type of the new value, the
        result is the label of the picked entry.
        """
        table, label = self.picks[name]
        if any(type(entry) is type(actual) and entry == actual for entry in table):
            return label(actual)
        return free if any(type(entry) is type(actual) for entry in table) else self.values[name]


@cache
def _classes(table: tuple[Any, ...], types: tuple[type, ...], label: Label) -> dict[Hashable, tuple[int, ...]]:
    """Groups the entries of a table by label: returns label -> indices of the entries with that label.

    `types` keeps apart the cached results for tables that compare equal, such as (True,) and (1,).
    """
    found: dict[Hashable, list[int]] = {}
    for index, entry in enumerate(table):
        found.setdefault(label(entry), []).append(index)
    return {value: tuple(indices) for value, indices in found.items()}


class _Merging:
    """State while a covering array is made shorter: number -> row, and number -> combinations that the row has."""

    def __init__(self) -> None:
        self.rows: dict[int, CoveringRow] = {}
        self.has: dict[int, set[Combination]] = {}
        self.num_added = 0
        self.seen: set[frozenset[int]] = set()

    def add(self, row: CoveringRow, has: set[Combination]) -> None:
        self.rows[self.num_added], self.has[self.num_added] = row, has
        self.num_added += 1

    def drop(self, *numbers: int) -> None:
        for number in numbers:
            del self.rows[number], self.has[number]

    def pairs(self) -> Iterator[tuple[int, int, set[Combination]]]:
        """Yields (number, number, combinations that only these two rows have) for each pair of rows once.

        Rows that alone have few combinations come first.
        """
        counts = Counter(itertools.chain.from_iterable(self.has.values()))
        alone = {number: {each for each in has if counts[each] == 1} for number, has in self.has.items()}
        ascending = sorted(alone, key=lambda number: len(alone[number]))
        for one, other in itertools.combinations(ascending, 2):
            if (pair := frozenset((one, other))) not in self.seen:
                self.seen.add(pair)
                both = {each for each in self.has[one] & self.has[other] if counts[each] == 2}
                yield one, other, alone[one] | alone[other] | both

    def in_order(self) -> list[CoveringRow]:
        """Returns the rows in a new order: each adds at least as many new combinations as any row after it would."""
        left, ordered = {number: set(has) for number, has in self.has.items()}, []
        while left:
            first = max(left, key=lambda number: len(left[number]))
            ordered.append(self.rows[first])
            added = left.pop(first)
            for has in left.values():
                has -= added
        return ordered


class _Builder:
    def __init__(
        self, build: Build, space: Space, strength: int, dangerous: tuple[str, ...], chance: random.Random
    ) -> None:
        self.build, self.space, self.strength, self.dangerous, self.chance = build, space, strength, dangerous, chance
        self.order: dict[str, int] = {}
        self.open: dict[Combination, None] = {}
        self.covered: dict[Combination, None] = {}
        self.partners: defaultdict[Value, set[Value]] = defaultdict(set)

    def array(self) -> Array:
        samples = [row for _ in range(SAMPLES) if (row := self._try((), None)) is not None]
        infeasible, rows = self._list_combinations(samples), list[CoveringRow]()
        while self.open:
            target = next(iter(self.open))
            row = self._best_row(target)
            if row is None:
                infeasible.append(target)
                self._close(target)
                continue
            rows.append(row)
            for combination in self._combinations(row.values):
                if combination in self.open:
                    self.covered[combination] = None
                    self._close(combination)
        return Array(tuple(self._merged(rows)), tuple(self.covered), tuple(infeasible))

    def _merged(self, rows: Iterable[CoveringRow]) -> list[CoveringRow]:
        """Returns rows that together have all combinations of `rows`: fewer than `rows` if two rows can be merged."""
        merging = _Merging()
        for row in rows:
            merging.add(row, self._covered(row))
        while any(self._merge(merging, *pair) for pair in merging.pairs()):
            pass
        return merging.in_order()

    def _merge(self, merging: _Merging, one: int, other: int, needed: set[Combination]) -> bool:
        """Replaces two rows by one row that has the combinations `needed`; returns False if no tried row has them."""
        values = {value for combination in needed for value in combination}
        if len(dict(values)) < len(values):
            return False
        tries = (self._try(tuple(values), None) for _ in range(MERGES))
        for row in itertools.chain((merging.rows[other],), tries):
            if row is not None and needed <= (has := self._covered(row)):
                merging.drop(one, other)
                merging.add(row, has)
                return True
        return False

    def _covered(self, row: CoveringRow) -> set[Combination]:
        return {combination for combination in self._combinations(row.values) if combination in self.covered}

    def _list_combinations(self, samples: list[CoveringRow]) -> list[Combination]:
        """Marks every combination that may be feasible as not yet covered; returns the infeasible combinations.

        `samples` are random cases. A combination counts as infeasible if no sample has it, although EXPECTED samples or
        more should have it by the frequencies of its values.
        """
        shares = Counter(value for row in samples for value in row.values)
        values: dict[str, list[Value]] = {}
        for value in shares:
            values.setdefault(value[0], []).append(value)
        self.order = {name: place for place, name in enumerate(values)}
        seen = {each for row in samples for each in self._combinations(row.values)}
        infeasible = []
        for names in self._groups(values):
            for combination in itertools.product(*(values[name] for name in names)):
                expected = float(len(samples))
                for value in combination:
                    expected *= shares[value] / len(samples)
                if combination not in seen and expected >= EXPECTED:
                    infeasible.append(combination)
                else:
                    self._open(combination)
        return infeasible

    def _groups(self, names: Iterable[str]) -> Iterator[tuple[str, ...]]:
        """Yields each group of axes for which every combination of values has to occur in some case."""
        names = sorted(names, key=self.order.__getitem__)
        yield from itertools.combinations(names, self.strength)
        if self.strength < 3:
            yield from itertools.combinations([name for name in names if name in self.dangerous], 3)

    def _combinations(self, values: Combination) -> Iterator[Combination]:
        named = {name: (name, value) for name, value in values if name in self.order}
        return (tuple(named[name] for name in names) for names in self._groups(named))

    def _open(self, combination: Combination) -> None:
        self.open[combination] = None
        if len(combination) == 2:
            for value, other in (combination, combination[::-1]):
                self.partners[value].add(other)

    def _close(self, combination: Combination) -> None:
        del self.open[combination]
        if len(combination) == 2:
            for value, other in (combination, combination[::-1]):
                self.partners[value].discard(other)

    def _best_row(self, target: Combination) -> CoveringRow | None:
        """Tries TRIES cases with the combination `target`, and returns the one with the most uncovered combinations.

        It returns None if no tried case has the target.
        """
        tries = (self._try(target, self._rate if number % 2 == 0 else None) for number in range(TRIES))
        having = [row for row in tries if row is not None and set(target) <= set(row.values)]
        return max(having, key=self._num_open, default=None)

    def _num_open(self, row: CoveringRow) -> int:
        return sum(combination in self.open for combination in self._combinations(row.values))

    def _rate(self, value: Value, others: Iterable[Value]) -> int:
        partners = self.partners.get(value, set())
        return sum(other in partners for other in others) + ((value,) in self.open)

    def _try(self, wanted: Combination, rate: Rate | None) -> CoveringRow | None:
        row = _Row(self.chance, wanted, rate)
        try:
            case = self.build(row, self.space)
        except Misuse:
            return None
        return CoveringRow(case, row.values_of(case), tuple(row.choices))
