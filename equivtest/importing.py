"""What 'package.module:NAME' stands for: code is named across process borders, never sent."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable, Sequence

from equivtest.errors import Misuse


def load_named(name: str, what: str) -> object:
    """The object that `name`, 'package.module:NAME', stands for.

    Args:
        what: What is named, for the message.

    Raises:
        Misuse: there is no such module, it raises while it is imported, or there is no such name in it.
    """
    module_name, colon, attribute = name.partition(":")
    try:
        if not colon:
            raise ImportError("no ':' between module and name")
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise Misuse(f"{what} {name!r} cannot be imported: {error}; write package.module:NAME") from error
    except Exception as error:  # somebody's module may raise anything
        raise Misuse(f"{what} {name!r} cannot be imported: {type(error).__name__}: {error}; mend its module") from error


def require_arguments(function: object, what: str, names: Sequence[str]) -> None:
    """Raises Misuse where `function` cannot be called with so many arguments; what is not written in Python passes."""
    if not callable(function):
        raise Misuse(f"{what} is no function: {function!r}")
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # what a decorator adds is its own
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        raise Misuse(f"{what} must take ({', '.join(names)}), but takes {signature}: {error}") from error


def suggestion(wanted: str, known: Sequence[str]) -> str:
    """What to write for a name that is not `known`: the one that it is close to, else any."""
    close = closest(wanted, known)
    return f"did you mean {close!r}?" if close else f"use one of {', '.join(known)}"


def closest(wanted: str, known: Iterable[str], *, likeness: float = 0.6) -> str:
    """The known name that is most like `wanted`, by difflib's ratio; '' where none is as like as that."""
    return next(iter(difflib.get_close_matches(wanted, list(known), n=1, cutoff=likeness)), "")
