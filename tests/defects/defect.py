"""Defects: subjects that are wrong in one way each.  A property counts only once it has rejected them.

A defect is one row of its file: the kind of bug, the smallest case, and why none is smaller.

    wrong = Replacing("rowwise_linear")

    @wrong("a term missing", LinearCase(world_size=1, ...), "one rank has a bias", claim="gradients_equal_unsharded")
    def bias_forgotten(case: LinearCase, mesh: DeviceMesh, given: Given) -> Answers: ...

    bias_on_every_rank = wrong("flags", ...)(run_with(run_linear, RowwiseParallel, WrongLinear))

    @Replacing("redistribute")("inputs modified", ...)
    @argument_of(run_redistribute)  # run_redistribute(case, mesh, given, reduced_in_place) is the subject
    def reduced_in_place(case: RedistributeCase, x: DTensor) -> DTensor: ...

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
        claim, kind: The claim that rejects it, and the kind of its verdict.
        smallest: The smallest case that shows it, and `why` no smaller case can.
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


KINDS = {
    "agrees_on_all_ranks": "replica",
    "does_not_touch_its_inputs": "touched",
    "drops_at_random": "chance",
    "is_exact_but_for_added_zeros": "bits",
    "is_exact_without_reduction": "bits",
    "is_the_identity_for_one_rank": "bits",
    "keeps_layout_of_parameter": "layout",
    "refuses": "not_refused",
    "repeats_itself": "repeat",
    "uses_only_collectives": "collectives",
}
"""The kind by which each claim rejects a defect that names none; all other claims reject a wrong value."""


@dataclass(frozen=True)
class Replacing:
    """Records defects of one right subject; that subject's property must reject each of them."""

    replaces: str

    def __call__(
        self, family: str, smallest: Case, why: str, *, claim: str = "equals_unsharded", kind: str = ""
    ) -> Callable[[S], S]:
        """Decorates a wrong subject, which stays as it is; the arguments are the attributes of `Defect`."""
        row = functools.partial(
            Defect, replaces=self.replaces, family=family, claim=claim, kind=kind or KINDS.get(claim, "value"),
            smallest=smallest, why=why,
        )  # fmt: skip

        def record(subject: S) -> S:
            subject.__dict__[_RECORD] = row
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
    """Returns the subject wrong(case, mesh, given, *more).answers(); the class's docstring describes the defect."""
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
