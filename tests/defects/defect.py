"""Defects: subjects that are wrong in one way each.  A property counts only once it has rejected them.

A defect is written with its record, as a whole function or as the one thing that is wrong in a right one:

    @defect(replaces="rowwise_linear", family="a term missing", claim="equals_unsharded", smallest=..., why=...)
    def bias_forgotten(case: LinearCase, mesh: DeviceMesh, given: Given) -> Answers: ...

    @defect(replaces="redistribute", ...)
    @argument_of(run_redistribute)
    def padding_kept(case: RedistributeCase, x: DTensor) -> DTensor: ...

    bias_on_every_rank = defect(replaces="rowwise_linear", ...)(run_with(run_linear, RowwiseParallel, WrongLinear))

Every process finds it as 'package.module:name'; no list names it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from equivtest.cases.case import Case

if TYPE_CHECKING:
    from equivtest.cases.names import Subject

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
    kind: str
    smallest: Case
    why: str

    @property
    def name(self) -> str:
        """The function's name."""
        return self.subject.partition(":")[2]


def defect(
    *, replaces: str, family: str, claim: str, kind: str = "value", smallest: Case, why: str
) -> Callable[[S], S]:
    """Decorates a subject, which it returns as it is; the arguments are the attributes of `Defect`."""

    def record(subject: S) -> S:
        subject.__dict__[_RECORD] = functools.partial(
            Defect, replaces=replaces, family=family, claim=claim, kind=kind, smallest=smallest, why=why
        )
        return subject

    return record


_RECORD = "defect"
"""The attribute in which a subject keeps its record: it makes a Defect of the subject's name."""


def run_with(run: Callable[..., Any], *more: Any) -> Subject:
    """The subject run(case, mesh, given, *more); the last argument is wrong, and its docstring says how."""
    return _subject(lambda *of_rank: run(*of_rank, *more), wrong=more[-1], annotated=run)


def argument_of(run: Callable[..., Any]) -> Callable[[Callable[..., Any]], Subject]:
    """Decorates the function that is wrong, and returns the subject run(case, mesh, given, function)."""
    return functools.partial(run_with, run)


def answers_of(wrong: type[Any], *more: Any) -> Subject:
    """The subject wrong(case, mesh, given, *more).answers(); the docstring of the class says what is wrong."""
    return _subject(lambda *of_rank: wrong(*of_rank, *more).answers(), wrong=wrong, annotated=wrong)


def _subject(answer: Callable[..., Any], wrong: Any, annotated: Any) -> Subject:
    def subject(case: Any, mesh: Any, given: Any) -> Any:
        return answer(case, mesh, given)

    subject.__module__, subject.__doc__ = wrong.__module__, wrong.__doc__
    subject.__annotations__["case"] = get_type_hints(annotated)["case"]  # by which other classes of cases are refused
    return subject


@functools.cache
def defects() -> tuple[Defect, ...]:
    """Every defect of every family; the audit in tests/engine/test_defects.py runs each one."""
    found = pkgutil.walk_packages([str(Path(__file__).parent)], f"{__package__}.")
    return tuple(each for module in found for each in _defects_in(importlib.import_module(module.name)))


def _defects_in(module: ModuleType) -> Iterator[Defect]:
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__ and _RECORD in vars(value):
            yield vars(value)[_RECORD](subject=f"{module.__name__}:{name}")
