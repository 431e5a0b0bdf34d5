"""Builds covering arrays: few cases with every combination of values of any two, or any three, axes.

The builder is greedy, like AETG (Cohen, Dalal, Fredman, Patton, "The AETG System", IEEE Transactions on Software
Engineering 23, 1997).  A row is one case.  For each row the builder chooses a combination that no row has yet, and
tries several cases with this combination.  In half of these cases every other axis takes the value that adds the most
new combinations.  The case with the most new combinations becomes the row.  At the end the builder looks for one case
that can replace two rows.  The family's own function builds each tried case from its tables, so that every row is a
valid case.  A combination that occurs in no tried case counts as infeasible.

The builder numbers the combinations.  A set of combinations is an int whose bit n stands for combination n, because
almost all of the builder's time goes into such sets.
"""

from __future__ import annotations

import functools
import itertools
import operator
import random
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
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
"""Values of different axes, in the order in which the builder first saw the axes."""

Build = Callable[[Draw, Space], Case]

SAMPLES = 300
"""Number of random cases from which the builder learns which axes and values there are."""
TRIES = 10
"""Number of cases that are tried for a combination.  Every second case is random on the other axes."""
MERGES = 5
"""Number of cases that are tried in place of two rows."""
EXPECTED = 15.0
"""A combination is infeasible if no random case has it, although its values' frequencies predict this many cases."""


class CoveringRow(NamedTuple):
    """One case of a covering array.

    Attributes:
        values: The value of each axis, in the order in which the values were picked.
        choices: (axis, index of the entry) of each pick from a table of several entries, in order.
    """

    case: Case
    values: Combination
    choices: tuple[tuple[str, int], ...]


class Array(NamedTuple):
    """A covering array, which is few cases with every feasible combination of values of any `strength` axes."""

    rows: tuple[CoveringRow, ...]
    covered: tuple[Combination, ...]
    infeasible: tuple[Combination, ...]


def covering_array(build: Build, space: Space, strength: int, seed: int, dangerous: Iterable[str] = ()) -> Array:
    """Builds cases in which every feasible combination of values of any `strength` axes occurs.

    Args:
        build: The family's function that builds a case from its tables.
        dangerous: Names of axes. Every combination of values of any three of these axes occurs too.
    """
    return _Builder(build, space, strength, tuple(dangerous), random.Random(seed)).array()


Rate = Callable[[Sequence[Value], Iterable[Value]], list[int]]
"""Function from the values of an axis, and the values chosen before on other axes, to a number for each value."""


class _Row:
    """Chooses, for one tried case, the entry of each table from which the family picks.

    An axis in the combination `wanted` gets its value in this combination. Any other axis gets the value for which the
    function `rate` returns the highest number, or a random value if there is no such function.
    """

    def __init__(self, chance: random.Random, wanted: Combination, rate: Rate | None) -> None:
        self.chance, self.wanted, self.rate = chance, dict(wanted), rate
        self.values: dict[str, Hashable] = {}
        self.picks: dict[str, tuple[tuple[Any, ...], Label, int]] = {}
        self.choices: list[tuple[str, int]] = []

    def pick(self, name: str, entries: Sequence[T], label: Label = itself) -> T:
        table = tuple(entries)
        if label is free:
            index = self.chance.randrange(len(table))
        else:
            classes = _classes(table, tuple(map(type, table)), label)
            self.values[name] = value = self._value(name, classes)
            index = self.chance.choice(classes[value])
            self.picks[name] = table, label, index
        if len(table) > 1:
            self.choices.append((name, index))
        return table[index]

    def _value(self, name: str, classes: Mapping[Hashable, tuple[int, ...]]) -> Hashable:
        if self.wanted.get(name, free) in classes:
            return self.wanted[name]
        best = list(classes)
        if self.rate is not None:
            rates = self.rate([(name, value) for value in best], self.values.items())
            most = max(rates)
            best = [value for value, rate in zip(best, rates, strict=True) if rate == most]
        return self.chance.choice(best)

    def values_of(self, case: Case) -> Combination:
        """Returns the values that the case has.  The family may have changed a field after its value was picked."""
        fields = fields_of(case)
        corrected = (
            (name, self._corrected(name, fields[name]) if name in fields else value)
            for name, value in self.values.items()
        )
        return tuple((name, value) for name, value in corrected if value is not free)

    def _corrected(self, name: str, actual: Any) -> Hashable:
        """Returns the label of the value that field `name` has in the case.

        The family may have changed the field after the row picked its value.  If the field's table lacks the new value,
        the result is `free`, so that the axis does not count.  If no entry of the table has the type of the new value,
        the result is the label of the picked entry.
        """
        table, label, index = self.picks[name]
        if actual is table[index]:
            return self.values[name]
        alike = [entry for entry in table if type(entry) is type(actual)]
        if actual in alike:
            return label(actual)
        return free if alike else self.values[name]


@cache
def _classes(table: tuple[Any, ...], types: tuple[type, ...], label: Label) -> dict[Hashable, tuple[int, ...]]:
    """Returns label -> indices of the table's entries with that label.

    `types` separates the cached results of tables that compare equal, such as (True,) and (1,).
    """
    found: dict[Hashable, list[int]] = {}
    for index, entry in enumerate(table):
        found.setdefault(label(entry), []).append(index)
    return {value: tuple(indices) for value, indices in found.items()}


class _Merging:
    """State while a covering array is made shorter: number -> row, and number -> combinations of the row."""

    def __init__(self) -> None:
        self.rows: dict[int, CoveringRow] = {}
        self.has: dict[int, int] = {}
        self.num_added = 0
        self.seen: set[tuple[int, int]] = set()

    def add(self, row: CoveringRow, has: int) -> None:
        self.rows[self.num_added], self.has[self.num_added] = row, has
        self.num_added += 1

    def drop(self, *numbers: int) -> None:
        for number in numbers:
            del self.rows[number], self.has[number]

    def pairs(self) -> Iterator[tuple[int, int, int]]:
        """Yields (number, number, combinations that only these rows have) for each pair of rows, the fewest first."""
        once, twice, thrice = _at_least(3, self.has.values())
        alone = {number: has & once & ~twice for number, has in self.has.items()}
        in_two = twice & ~thrice
        ascending = sorted(alone, key=lambda number: alone[number].bit_count())
        for one, other in itertools.combinations(ascending, 2):
            if (pair := (min(one, other), max(one, other))) not in self.seen:
                self.seen.add(pair)
                yield one, other, alone[one] | alone[other] | (self.has[one] & self.has[other] & in_two)

    def in_order(self) -> list[CoveringRow]:
        """Returns the rows so that each row adds the most new combinations to the rows before it."""
        left, ordered = dict(self.has), []
        while left:
            first = max(left, key=lambda number: left[number].bit_count())
            ordered.append(self.rows[first])
            added = left.pop(first)
            left = {number: has & ~added for number, has in left.items()}
        return ordered


def _at_least(most: int, sets: Iterable[int]) -> list[int]:
    """Returns, for each number from 1 to `most`, the combinations that are in at least that many of `sets`."""
    found = [0] * most
    for each in sets:
        for place in range(most - 1, 0, -1):
            found[place] |= found[place - 1] & each
        found[0] |= each
    return found


def _members(numbers: int) -> Iterator[int]:
    """Yields the numbers in a set, ascending."""
    while numbers:
        lowest = numbers & -numbers
        yield lowest.bit_length() - 1
        numbers ^= lowest


class _Builder:
    def __init__(
        self, build: Build, space: Space, strength: int, dangerous: tuple[str, ...], chance: random.Random
    ) -> None:
        self.build, self.space, self.strength, self.dangerous, self.chance = build, space, strength, dangerous, chance
        self.combinations: list[Combination] = []
        self.having: dict[int, dict[Value, int]] = {}  # length -> value -> combinations of this length that have it
        self.open = 0
        self.covered = 0

    def array(self) -> Array:
        samples = [row for _ in range(SAMPLES) if (row := self._try((), None)) is not None]
        infeasible = self._list_combinations(samples)
        covered, rows = list[Combination](), list[CoveringRow]()
        while self.open:
            target = next(_members(self.open))
            row = self._best_row(target)
            if row is None:
                infeasible.append(self.combinations[target])
                self.open ^= 1 << target
                continue
            rows.append(row)
            new = self._combinations(row.values) & self.open
            covered += [self.combinations[number] for number in _members(new)]
            self.open ^= new
            self.covered |= new
        return Array(tuple(self._merged(rows)), tuple(covered), tuple(infeasible))

    def _merged(self, rows: Iterable[CoveringRow]) -> list[CoveringRow]:
        merging = _Merging()
        for row in rows:
            merging.add(row, self._combinations(row.values) & self.covered)
        while any(self._merge(merging, *pair) for pair in merging.pairs()):
            pass
        return merging.in_order()

    def _merge(self, merging: _Merging, one: int, other: int, needed: int) -> bool:
        """Replaces two rows by one row that has the combinations `needed`.  Returns False if no tried row has them."""
        values = {value for having in self.having.values() for value, each in having.items() if each & needed}
        if len(dict(values)) < len(values):
            return False
        tries = (self._try(tuple(values), None) for _ in range(MERGES))
        for row in itertools.chain((merging.rows[other],), tries):
            if row is not None and not needed & ~(has := self._combinations(row.values) & self.covered):
                merging.drop(one, other)
                merging.add(row, has)
                return True
        return False

    def _list_combinations(self, samples: list[CoveringRow]) -> list[Combination]:
        """Numbers the combinations, marks them as open, and returns the infeasible combinations (see EXPECTED)."""
        shares = Counter(value for row in samples for value in row.values)
        values: dict[str, list[Value]] = {}
        for value in shares:
            values.setdefault(value[0], []).append(value)
        for names in self._groups(tuple(values)):
            for combination in itertools.product(*(values[name] for name in names)):
                having = self.having.setdefault(len(combination), dict.fromkeys(shares, 0))
                for value in combination:
                    having[value] |= 1 << len(self.combinations)
                self.combinations.append(combination)
        seen = functools.reduce(operator.or_, (self._combinations(row.values) for row in samples), 0)
        infeasible = []
        for number, combination in enumerate(self.combinations):
            expected = float(len(samples))
            for value in combination:
                expected *= shares[value] / len(samples)
            if not seen >> number & 1 and expected >= EXPECTED:
                infeasible.append(combination)
            else:
                self.open |= 1 << number
        return infeasible

    def _groups(self, names: Collection[str]) -> Iterator[tuple[str, ...]]:
        yield from itertools.combinations(names, self.strength)
        if self.strength < 3:
            yield from itertools.combinations([name for name in names if name in self.dangerous], 3)

    def _combinations(self, values: Combination) -> int:
        parts = (
            _at_least(length, [having.get(value, 0) for value in values])[-1] for length, having in self.having.items()
        )
        return functools.reduce(operator.or_, parts, 0)

    def _best_row(self, target: int) -> CoveringRow | None:
        """Tries cases with the combination `target`, and returns the case with the most open combinations, or None."""
        wanted = self.combinations[target]
        tries = [self._try(wanted, self._rates if number % 2 == 0 else None) for number in range(TRIES)]
        new = [(row, self._combinations(row.values) & self.open) for row in tries if row is not None]
        having = [(row, each.bit_count()) for row, each in new if each >> target & 1]
        return max(having, key=operator.itemgetter(1), default=(None, 0))[0]

    def _rates(self, values: Sequence[Value], others: Iterable[Value]) -> list[int]:
        """Returns, for each of `values`, the number of open combinations of the value alone or with one of `others`."""
        pairs, singles = self.having.get(2, {}), self.having.get(1, {})
        with_others = functools.reduce(operator.or_, (pairs.get(other, 0) for other in others), 0)
        return [
            (self.open & (pairs.get(value, 0) & with_others | singles.get(value, 0))).bit_count() for value in values
        ]

    def _try(self, wanted: Combination, rate: Rate | None) -> CoveringRow | None:
        row = _Row(self.chance, wanted, rate)
        try:
            case = self.build(row, self.space)
        except Misuse:
            return None
        return CoveringRow(case, row.values_of(case), tuple(row.choices))
