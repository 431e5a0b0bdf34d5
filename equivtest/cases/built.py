"""Cases that a function builds from tables, whoever picks the entries: Hypothesis, or the rows of a covering array."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from equivtest.cases.axes import Draw
    from equivtest.cases.case import Case
    from equivtest.property import Space

C = TypeVar("C", bound="Case")


class Cases(Generic[C]):
    """The cases of a family or of a program.  A call with a `Space` returns a strategy of Hypothesis.

    Attributes:
        build: Function (draw, space, ...) -> case, which picks entries by any `Draw`.
        dangerous: Names of axes. A conformance run has every combination of values of any three of these axes.
    """

    def __init__(self, build: Callable[..., C], dangerous: tuple[str, ...] = ()) -> None:
        functools.update_wrapper(self, build)
        self.build, self.dangerous = build, dangerous

    def __call__(self, space: Space, **more: Any) -> SearchStrategy[C]:
        from equivtest.cases.drawing import built  # a rank that imports your file needs no Hypothesis

        return built(self.build, space, more)


def builder_of(cases: Callable[[Space], SearchStrategy[Any]]) -> Callable[[Draw, Space], Case] | None:
    """Returns the `build` of `Cases` with its fixed arguments, or None if `cases` is a plain function of Hypothesis."""
    if isinstance(cases, functools.partial) and isinstance(cases.func, Cases):
        return functools.partial(cases.func.build, **cases.keywords)
    return cases.build if isinstance(cases, Cases) else None


def dangerous_axes(cases: Callable[[Space], SearchStrategy[Any]]) -> tuple[str, ...]:
    """Returns the axes whose values a conformance run combines three at a time."""
    return getattr(getattr(cases, "func", cases), "dangerous", ())
