"""Finds the parts of each family by their names, without a list of families.

A family is a folder of `equivtest/families/`.  It has a module `case`, and may have the modules `strategy`, `values`,
`oracle`, `collectives` and `subject`.  Any other folder within the family's folder is a variant of the family.  Parts
that the variant lacks come from the folder above.  The parts for your programs are in `equivtest/programs/`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

FAMILIES = "equivtest.families"
PROGRAMS = "equivtest.programs"

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class ByCase(Generic[P, R]):
    """A function with a separate body for each class of cases, chosen by the class of the first argument.

    A family registers the body for its class in one of the modules that `parts` names, such as 'oracle'.  A call
    imports these modules of the family, so that the caller need not.  Another package registers its body in any module
    that the package imports.
    """

    def __init__(self, body: Callable[Concatenate[Any, P], R], parts: tuple[str, ...]) -> None:
        functools.update_wrapper(self, body)
        self._parts = parts
        self._body_of = functools.singledispatch(body)

    def __call__(self, case: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the body for the case's class, or for the nearest base class that has a body."""
        case_type: type = type(case)
        _load(case_type, self._parts)
        return self._body_of(case, *args, **kwargs)

    def register(self, body: F) -> F:
        """Registers a body for the class in the annotation of the body's first parameter, and returns the body."""
        self._body_of.register(body)
        return body


def by_case(*parts: str) -> Callable[[Callable[Concatenate[Any, P], R]], ByCase[P, R]]:
    """Returns a decorator that makes a `ByCase` of a function, which is the body for classes without their own body.

    Args:
        parts: Names of the modules of a family that a call imports first, such as 'oracle'.
    """
    return lambda body: ByCase(body, parts)


@functools.cache
def packages() -> tuple[str, ...]:
    """Returns the full names of all families, of their variants and of the programs.  Imports only the packages."""
    families, programs = map(importlib.import_module, (FAMILIES, PROGRAMS))
    return (*_packages_below(families), programs.__name__)


@functools.cache
def modules_of(part: str) -> tuple[ModuleType, ...]:
    """Imports and returns the module `part` of every family.  A folder is returned with the modules within it."""
    names = (f"{package}.{part}" for package in packages())
    found = (importlib.import_module(name) for name in names if importlib.util.find_spec(name) is not None)
    return tuple(itertools.chain.from_iterable(map(_with_modules_within, found)))


def _with_modules_within(module: ModuleType) -> Iterator[ModuleType]:
    yield module
    for each in pkgutil.iter_modules(getattr(module, "__path__", []), f"{module.__name__}."):
        yield importlib.import_module(each.name)


def _packages_below(package: ModuleType) -> Iterator[str]:
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        is_part = package.__name__ != FAMILIES and module.name.rpartition(".")[2] in PARTS
        if module.ispkg and not is_part:
            yield module.name
            yield from _packages_below(importlib.import_module(module.name))


PARTS = ("collectives", "oracle", "subject", "values")
"""The parts that may be folders.  Any other folder within a family is a variant of the family."""


@functools.cache
def _load(case_type: type, parts: tuple[str, ...]) -> None:
    for base in case_type.__mro__:
        package = base.__module__.rpartition(".")[0]
        while package == PROGRAMS or package.startswith(f"{FAMILIES}."):
            for part in parts:
                if importlib.util.find_spec(f"{package}.{part}") is not None:
                    importlib.import_module(f"{package}.{part}")
            package = package.rpartition(".")[0]
