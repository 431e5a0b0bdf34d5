"""Which cases a subject takes, as far as it says so."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import pytest

from equivtest.cases.names import SUBJECTS, Subject, require_fit, resolve
from equivtest.errors import Misuse
from equivtest.families.linear.case import LinearCase
from equivtest.families.zero3.fetch.case import FetchCase

FETCH = FetchCase(world_size=1)


class Sized(Protocol):
    """Something that is no class of cases."""

    size: int


@dataclass
class Callable_:
    """A subject that cannot be hashed."""

    scale: float = 1.0

    def __call__(self, case: Any, mesh: Any, given: Any) -> dict[str, Any]:
        return {}


def of_anything(case: Any, mesh: Any, given: Any) -> dict[str, Any]:
    return {}


def of_a_protocol(case: Sized, mesh: Any, given: Any) -> dict[str, Any]:
    return {}


def of_arguments(*args: Any) -> dict[str, Any]:
    return {}


def of_linears(case: LinearCase, mesh: Any, given: Any) -> dict[str, Any]:
    return {}


def of_named_linears(case: "LinearCase", mesh: Any, given: Any) -> dict[str, Any]:
    return {}


@functools.wraps(of_linears)
def wrapped(*args: Any) -> dict[str, Any]:
    return of_linears(*args)


@pytest.mark.parametrize(
    "function",
    [of_anything, of_a_protocol, of_arguments, Callable_(), functools.partial(of_anything), dict, print, max],
)
def test_subject_without_an_annotation_accepts_every_case(function: Callable[..., Any]) -> None:
    require_fit(cast(Subject, function), FETCH)


@pytest.mark.parametrize("function", [of_linears, of_named_linears, wrapped, functools.partial(of_linears)])
def test_subject_with_an_annotated_case_class_refuses_other_cases(function: Callable[..., Any]) -> None:
    require_fit(cast(Subject, function), LinearCase(world_size=1, style="colwise"))
    with pytest.raises(Misuse, match="the subject takes a LinearCase, got a FetchCase"):
        require_fit(cast(Subject, function), FETCH)


@pytest.mark.parametrize("name", [name for name in SUBJECTS if not name.startswith(("deepspeed", "zero3_fetch"))])
def test_every_shipped_subject_annotates_its_case_class(name: str) -> None:
    with pytest.raises(Misuse, match="got a FetchCase"):
        require_fit(resolve(name), FETCH)
