"""Cases drawn outside of a property, from a fixed seed, by the strategies of the shipped properties."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis.strategies import SearchStrategy

from equivtest.base import limits
from equivtest.cases.case import C, Case
from equivtest.cases.names import SUBJECTS
from equivtest.cases.parts import FAMILIES
from equivtest.property import Property, Space
from equivtest.pytest_plugin.suite import shipped
from equivtest.search.local_constants import no_local_constants

SPACE = Space(limits.WORLD_SIZES, limits.DTYPES)


def _strategy_of(prop: Property) -> Hashable:
    """Identifies a property's strategy; strategies of modules, which differ only by the module, count as one."""
    cases = prop.cases
    if prop.subject == "module":
        return prop.subject
    return (cases.func, cases.args, *cases.keywords.items()) if isinstance(cases, functools.partial) else cases


def family_of(name: str) -> str:
    """The folder of the family, or of its variant, that the property's subject lies in."""
    folder = SUBJECTS[PROPERTIES[name].subject].partition(".subject")[0].partition(".run")[0]
    return folder.removeprefix(f"{FAMILIES}.").removeprefix("equivtest.")


_SHIPPED = shipped()
_FIRST = {_strategy_of(prop): name for name, prop in reversed(_SHIPPED.items())}
PROPERTIES: dict[str, Property] = {name: prop for name, prop in _SHIPPED.items() if name in _FIRST.values()}
"""Every shipped property by name; of those with one strategy the first alone."""

STRATEGIES: dict[str, Callable[[Space], SearchStrategy[Case]]] = {n: prop.cases for n, prop in PROPERTIES.items()}


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrizes `name`; the ids begin with the family's name."""
    return pytest.mark.parametrize("name", [pytest.param(name, id=f"{family_of(name)}-{name}") for name in names])


@functools.cache
def run_of(name: str) -> tuple[Any, ...]:
    """Draws the 240 cases of a whole run: one search, with its own seed, for each world size."""
    spaces = {world_size: Space((world_size,), limits.DTYPES) for world_size in limits.WORLD_SIZES}
    return tuple(case for n, space in spaces.items() for case in drawn(STRATEGIES[name](space), 60, number=n))


def drawn(strategy: SearchStrategy[C], num: int, *, number: int = 0) -> list[C]:
    """Draws `num` cases, the same ones whatever else has been imported."""
    cases: list[C] = []

    @seed(number)
    @settings(
        max_examples=num,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def keep(case: C) -> None:
        cases.append(case)

    with no_local_constants():
        keep()
    return cases


def smallest(strategy: SearchStrategy[C], condition: Callable[[C], bool] = lambda _: True) -> C:
    """Returns the case to which the strategy shrinks under `condition`.

    Hypothesis does not explain the failure, which would trace a hundred further draws line by line.
    """
    phases = [Phase.generate, Phase.shrink]
    return find(strategy, condition, settings=settings(max_examples=2000, database=None, deadline=None, phases=phases))
