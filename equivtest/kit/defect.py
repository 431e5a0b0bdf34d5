"""Defects: subjects that are wrong in one way each.  A property counts only once it has rejected them.

A defect is written once, with its record:

    @defect(replaces="rowwise_linear", family="a term missing", claim="equals_unsharded", smallest=..., why=...)
    def last_feature_lost(case: LinearCase, mesh: DeviceMesh, given: Given) -> Answers: ...

Where a subject is right but for one class or function, the subject is made of that, and the class or function says in
its docstring what is wrong: `argument_of` decorates a function, `run_with` and `answers_of` take a class.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from equivtest.kit.case import Case
from equivtest.kit.parts import modules_of

if TYPE_CHECKING:
    from equivtest.kit.names import Subject
    from equivtest.verdicts.verdict import Kind

S = TypeVar("S", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Defect:
    """A subject that is wrong in one way.

    Attributes:
        subject: 'package.module:function'.
        replaces: The subject under whose property it must be rejected.
        family: The kind of real bug it stands for.
        claim, kind: What rejects it.
        smallest: The smallest case that shows it, and `why` no smaller one can.
    """

    subject: str
    replaces: str
    family: str
    claim: str
    kind: Kind
    smallest: Case
    why: str

    @property
    def name(self) -> str:
        """The function's name."""
        return self.subject.partition(":")[2]


def defect(
    *, replaces: str, family: str, claim: str, kind: Kind = "value", smallest: Case, why: str
) -> Callable[[S], S]:
    """Decorates a subject: records what is wrong with it (see `Defect`), and returns it as it is."""

    def record(subject: S) -> S:
        subject.__dict__[_RECORD] = functools.partial(
            Defect, replaces=replaces, family=family, claim=claim, kind=kind, smallest=smallest, why=why
        )
        return subject

    return record


_RECORD = "defect"
"""Where a subject has its record: all of a Defect but the subject's name."""


def run_with(run: Callable[..., Any], *more: Any) -> Subject:
    """The subject run(case, mesh, given, *more), of which the last argument is wrong and says so."""
    return _subject(lambda *of_rank: run(*of_rank, *more), wrong=more[-1], hinting=run)


def argument_of(run: Callable[..., Any]) -> Callable[[Callable[..., Any]], Subject]:
    """Decorates a function that is wrong: the subject is run(case, mesh, given, function)."""
    return functools.partial(run_with, run)


def answers_of(wrong: type[Any], *more: Any) -> Subject:
    """The subject wrong(case, mesh, given, *more).answers()."""
    return _subject(lambda *of_rank: wrong(*of_rank, *more).answers(), wrong=wrong, hinting=wrong)


def _subject(answer: Callable[..., Any], wrong: Any, hinting: Any) -> Subject:
    def subject(case: Any, mesh: Any, given: Any) -> Any:
        return answer(case, mesh, given)

    subject.__module__, subject.__doc__ = wrong.__module__, wrong.__doc__
    subject.__annotations__["case"] = get_type_hints(hinting)["case"]  # a case of another class is refused by it
    return subject


@functools.cache
def defects() -> tuple[Defect, ...]:
    """Every defect of every family; the audit in tests/test_defects.py runs each one."""
    return tuple(each for module in modules_of("defects") for each in _defects_in(module))


def _defects_in(module: ModuleType) -> Iterator[Defect]:
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__ and _RECORD in vars(value):
            yield vars(value)[_RECORD](subject=f"{module.__name__}:{name}")
