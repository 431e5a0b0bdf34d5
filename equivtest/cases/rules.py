"""Rules that a field of a case declares next to its type: `style: Annotated[str, OneOf(STYLES)]`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from inspect import get_annotations
from typing import Any, Protocol


class Rule(Protocol):
    """Requirement on the value of one field."""

    def broken(self, value: Any) -> str:
        """Returns the requirement as text if the value breaks the requirement. Returns '' if the value fulfils it."""


@dataclass(frozen=True)
class OneOf:
    values: tuple[Any, ...]

    def broken(self, value: Any) -> str:
        return "" if value in self.values else f"must be one of {listed(self.values)}"


@dataclass(frozen=True)
class Within:
    """Requires a number from `least` to `most`, or of at least `least` if `most` is None.

    For a tuple, each number must fulfil this.
    """

    least: float
    most: float | None = None

    def broken(self, value: Any) -> str:
        numbers = value if isinstance(value, tuple) else (value,)
        if all(self.least <= number and (self.most is None or number <= self.most) for number in numbers):
            return ""
        return f"must be in {self.least}..{self.most}" if self.most is not None else f"must be at least {self.least}"


@dataclass(frozen=True)
class Dims:
    """Requires a shape of `least` to `most` dims, each of size `smallest` or more."""

    least: int
    most: int
    smallest: int = 1

    def broken(self, value: Any) -> str:
        if self.least <= len(value) <= self.most and all(size >= self.smallest for size in value):
            return ""
        how_many = f"{self.least} to {self.most}" if self.least else f"at most {self.most}"
        how_many = f"{self.most}" if self.least == self.most else how_many
        return f"must have {how_many} dims of at least {self.smallest}"


@dataclass(frozen=True)
class SomeOf:
    """Requires a tuple with some, all or none of `values`, each at most once and in the order of `values`."""

    values: tuple[Any, ...]

    def broken(self, value: Any) -> str:
        is_so = value == tuple(each for each in self.values if each in value)
        return "" if is_so else f"must list some of {listed(self.values)} in this order"


def listed(values: Iterable[Any]) -> str:
    """Joins the values by commas, as code unless all are non-empty texts, so that '' is visible."""
    values = tuple(values)
    are_seen = all(isinstance(value, str) and value for value in values)
    return ", ".join(values if are_seen else map(repr, values))


def broken_rules(case: Any) -> Iterator[str]:
    for name, rules in _rules(case.__class__):
        value = getattr(case, name)
        for rule in rules:
            why = rule.broken(value)
            if why:
                yield f"{name} {why}, got {value!r}"


@functools.cache
def _rules(case_type: Any) -> tuple[tuple[str, tuple[Rule, ...]], ...]:
    """Returns (field, its rules) for each field with rules.

    If a class declares a field again without rules, the base class's rules hold.
    """
    rules: dict[str, tuple[Rule, ...]] = {}
    for base in reversed(case_type.__mro__):
        for name, hint in get_annotations(base, eval_str=True).items():
            declared = tuple(each for each in getattr(hint, "__metadata__", ()) if hasattr(each, "broken"))
            rules[name] = declared or rules.get(name, ())
    return tuple((name, declared) for name, declared in rules.items() if declared)
