"""Imports an object by its name 'package.module:NAME'. Processes send each other such names instead of code."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

from equivtest.base.functions import FILE, load_file, parts_of, with_given
from equivtest.errors import Misuse

MOST_NAMES = 8


def load_named(name: str, what: str) -> object:
    """Imports the object with the name 'package.module:NAME' or 'file.py:NAME'.

    Args:
        what: Kind of object, for the message.

    Raises:
        Misuse: the module is missing, raises at import, or lacks the name.
    """
    module_name, attribute, values, named = parts_of(name)
    said = f"{what} {name!r} cannot be imported"
    if not attribute:
        raise Misuse(f"{said}: no ':' between module and name; write package.module:NAME, or file.py:NAME")
    try:
        module = load_file(module_name) if module_name.endswith(FILE) else importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the module may raise any exception
        if isinstance(error, FileNotFoundError) and not Path(module_name).is_file() and module_name.endswith(FILE):
            raise Misuse(
                f"{said}: there is no file {module_name} in {Path.cwd()}; start in the file's folder"
            ) from error
        if isinstance(error, ModuleNotFoundError) and _is_within(error.name or "", module_name):
            moved = "; modules of equivtest have moved, see CHANGELOG.md" * module_name.startswith("equivtest.")
            raise Misuse(
                f"{said}: {error}{_near_modules(error.name or '')}{moved}; write package.module:NAME"
            ) from error
        if not module_name or module_name.startswith("."):
            raise Misuse(f"{said}: {error}; write package.module:NAME") from error
        raise Misuse(f"{said}: {type(error).__name__}: {error}; fix the module, which raises this at import") from error
    value: object = module
    for each in attribute.split("."):
        try:
            value = getattr(value, each)
        except AttributeError as error:
            raise Misuse(f"{said}: {error}: {_without(module, attribute)}; write package.module:NAME") from error
    return with_given(value, values, named)


def _is_within(name: str, module_name: str) -> bool:
    return f"{module_name}.".startswith(f"{name}.")


def _near_modules(name: str) -> str:
    """Returns where Python searched for a missing module, with a similar name, or '' if its parent is no package."""
    parent, _, last = name.rpartition(".")
    folders = list(getattr(sys.modules[parent], "__path__", [])) if parent else sys.path
    if parent and not folders:
        return ""
    near = closest(last, [found.name for found in pkgutil.iter_modules(folders)])
    where = f"in {', '.join(folders)}" if parent else f"in {Path.cwd()} or elsewhere on Python's path"
    did_you_mean = f": did you mean {f'{parent}.' * bool(parent)}{near}?" if near else ""
    return f" {where}{did_you_mean}"


def _without(module: ModuleType, attribute: str) -> str:
    """Returns a module's file and public names, and another file with the same module name."""
    name, file = module.__name__, module.__file__
    folders = list(getattr(module, "__path__", []))
    where = (
        f"the module is {file}"
        if file
        else f"the module is the folder {folders[0]}, which has no __init__.py"
        if folders
        else ""
    )
    hidden = _hidden_by(module)
    if hidden is not None:
        outside = "" if str(hidden[0]) in map(_absolute, sys.path) else f", and put {hidden[0]} on PYTHONPATH"
        where += f"; it hides {hidden[1]}: rename one of the two{outside}"
    if attribute in (found.name for found in pkgutil.iter_modules(folders)):
        return f"{where}; {name}.{attribute} is a module: did you mean {name}.{attribute}:NAME?"
    public = [each for each in vars(module) if not each.startswith("_")]
    own = [each for each in public if getattr(vars(module)[each], "__module__", "") == name]
    if near := closest(attribute, public):
        return f"{where}; did you mean {near!r}?"
    others = f" and {len(own) - MOST_NAMES} others" if len(own) > MOST_NAMES else ""
    return f"{where}; it defines {', '.join(own[:MOST_NAMES])}{others}" if own else where


def _hidden_by(module: ModuleType) -> tuple[Path, Path] | None:
    """Returns (folder, file) of a module with the same name that `module` hides, or None.

    The folder is on Python's path or is the current folder, and contains the file.
    """
    parts = module.__name__.split(".")
    own = Path(module.__file__).resolve() if module.__file__ else None
    for folder in map(Path, map(_absolute, [*sys.path, ""])):
        for file in (folder.joinpath(*parts[:-1], f"{parts[-1]}.py"), folder.joinpath(*parts, "__init__.py")):
            if file.is_file() and file.resolve() != own:
                return folder, file
    return None


def _absolute(folder: str) -> str:
    """Returns a folder of Python's path as an absolute path.  The text '' means the current folder."""
    return str(Path(folder).absolute())


def require_arguments(function: object, what: str, names: Sequence[str]) -> None:
    """Raises Misuse unless `function` accepts as many arguments as there are `names`, or Python cannot tell."""
    if not callable(function):
        raise Misuse(f"{what} is not a function: {function!r}")
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # a decorator's own arguments count
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        raise Misuse(f"{what} must take ({', '.join(names)}), but takes {signature}: {error}") from error


def suggestion(wanted: str, known: Sequence[str]) -> str:
    """Returns advice with the known name that is similar to `wanted`, or with all known names."""
    close = closest(wanted, known)
    return f"did you mean {close!r}?" if close else f"use one of {', '.join(known)}"


def closest(wanted: str, known: Iterable[str], *, likeness: float = 0.6) -> str:
    """Returns the known name that is most similar to `wanted` by difflib's ratio, or ''."""
    return next(iter(difflib.get_close_matches(wanted, list(known), n=1, cutoff=likeness)), "")
