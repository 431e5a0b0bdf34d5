"""Draws cases with Hypothesis, which chooses an entry of each table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivtest.cases.axes import Label, itself

if TYPE_CHECKING:
    from equivtest.property import Space

T = TypeVar("T")


class Drawing:
    """Picks entries of tables with Hypothesis.

    Each entry carries the name of its axis.  Without the name, Hypothesis treats draws from two equal tables as the
    same draw.  It then spends five of six examples on copies of another example, in which one draw repeats the value of
    the other.

    Source: ConjectureRunner.generate_mutations_from, Hypothesis 6.170.
    """

    def __init__(self, draw: DrawFn) -> None:
        self._draw = draw

    def pick(self, name: str, table: Sequence[T], label: Label = itself) -> T:
        entries: SearchStrategy[tuple[str, T]] = _entries(name, tuple(table), tuple(map(type, table)))
        return self._draw(entries)[1]


@cache
def _entries(name: str, table: tuple[T, ...], types: tuple[type, ...]) -> SearchStrategy[tuple[str, T]]:
    """Makes the strategy of a table, once per table.  `types` keeps True and 1 apart in the cache."""
    return st.sampled_from([(name, entry) for entry in table])


@st.composite
def built(draw: DrawFn, build: Callable[..., T], space: Space, more: dict[str, Any]) -> T:
    return build(Drawing(draw), space, **more)
