"""Names functions so that other processes can import them: 'file.py:NAME', or 'package.module:NAME' if installed.

The name of a functools.partial ends with its arguments, which must be plain values: 'models.py:block(8, bias=False)'.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from equivtest.errors import Misuse, shorten

FILE = ".py"
_NAMED = re.compile(r"(?P<home>[^:]*):(?P<attribute>[^(]*)(?P<arguments>\(.*\))?", re.DOTALL)
_rank: list[bool] = []


def be_rank() -> None:
    """Marks this process as a rank: it may import your files, and equivtest judges nothing in it."""
    _rank.append(True)


def is_rank() -> bool:
    return bool(_rank)


def name_of(function: object, what: str) -> str:
    """Returns the name by which any process can import a function or class.  A string already is such a name.

    Args:
        what: Purpose of the function, such as 'build', for the message.

    Raises:
        Misuse: no other process can import the function.
    """
    if isinstance(function, str):
        return function
    if isinstance(function, functools.partial):
        return with_arguments(name_of(function.func, what), function.args, function.keywords, what)
    qualified = getattr(function, "__qualname__", "")
    if not callable(function) or not qualified:
        kind = type(function).__name__
        raise Misuse(
            f"{what} must be a function or a class, got a {kind}: write `def {what}(...)` in a file, and pass {what}"
        )
    _require_findable(qualified, function, what)
    module = sys.modules.get(str(getattr(function, "__module__", "")))
    home = "" if module is None else _home_of(module)
    if not home or _is_typed_in(function):
        raise Misuse(
            f"{what} {qualified!r} was defined in a notebook or at a prompt, and ranks can import functions from "
            "files only: write it to a file, such as models.py, and import it from there"
        )
    if _attribute(module, qualified) != function:
        raise Misuse(
            f"{what} {qualified!r}: {home} has another object under this name, because a decorator or a second "
            "definition replaced the function; give each of the two its own name at the top level of the file"
        )
    return f"{home}:{qualified}"


def _require_findable(qualified: str, function: object, what: str) -> None:
    """Raises Misuse unless `function` is an attribute named `qualified` at the top level of its file."""
    if "<lambda>" in qualified:
        raise Misuse(f"{what} is a lambda, which has no name to send to the ranks: write `def {what}(...)` in a file")
    if "<locals>" in qualified:
        outer, _, name = qualified.rpartition(".<locals>.")
        raise Misuse(
            f"{what} {name!r} is defined within {outer.rpartition('.')[2]!r}, so ranks cannot import it: move it to "
            "the top level of its file, and pass it the variables of the outer function by options= or "
            "functools.partial"
        )
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, type | ModuleType):
        raise Misuse(
            f"{what} {qualified!r} is a method of one object: write `def {what}(...)` at the top level of a file"
        )


def _is_typed_in(function: object) -> bool:
    """True if the function was typed at a prompt, such as the prompt of `python -i`."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith("<")


def _home_of(module: ModuleType) -> str:
    """Returns a module's file relative to the current folder, or its name, or '' if no other process can import it."""
    file = getattr(module, "__file__", None)
    if not file:
        return "" if module.__name__ == "__main__" else module.__name__
    path = Path(file).resolve()
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    if not installed and path.suffix == FILE and path.is_relative_to(Path.cwd()):
        home = path.relative_to(Path.cwd()).as_posix()
    elif module.__name__ != "__main__" and (not path.is_file() or module.__name__ in _names_of(path)):
        home = module.__name__
    else:
        home = str(path)
    if set(home) & set(":#("):
        raise Misuse(f"ranks cannot import {home}: its path holds a ':', '#' or '('; rename that folder or file")
    return home


def with_arguments(name: str, values: tuple[object, ...], named: Mapping[str, object], what: str) -> str:
    """Adds arguments to a function's name: 'models.py:block' becomes 'models.py:block(8, bias=False)'.

    If the name already has arguments, the new arguments come after them.

    Raises:
        Misuse: a value is not plain.
    """
    texts = [plain(value, f"an argument of {what}") for value in values]
    texts += [f"{key}={plain(value, f'{key} of {what}')}" for key, value in named.items()]
    if not texts:
        return name
    before = f"{name[:-1]}, " if name.endswith(")") else f"{name}("
    return f"{before}{', '.join(texts)})"


def plain(value: object, what: str) -> str:
    """Returns the Python code of a plain value: None, a bool, int, float or str, or a tuple, list or dict of these.

    JSON can write all plain values.

    Raises:
        Misuse: the value is not plain.
    """
    try:
        json.dumps(value, allow_nan=False)
        text = repr(value).replace("#", r"\x23")  # a name is cut at '#', see `call_builder`
        if ast.literal_eval(text) == value:
            return text
    except (TypeError, ValueError, SyntaxError):
        pass
    kind = type(value).__name__
    raise Misuse(
        f"{what} must be a plain value, such as a number, a string or a tuple of these, got a {kind}: {value!r}"
    )


def parts_of(name: str) -> tuple[str, str, tuple[object, ...], dict[str, object]]:
    """Splits a name into its file or module, its attribute ('' without a ':'), its positional and its keyword
    arguments.

    Raises:
        Misuse: the arguments are no plain values.
    """
    match = _NAMED.fullmatch(name)
    if match is None:
        return name, "", (), {}
    values, named = _arguments(name, match["arguments"] or "()")
    return match["home"], match["attribute"], values, named


@functools.lru_cache(maxsize=256)
def _arguments(name: str, text: str) -> tuple[tuple[object, ...], dict[str, object]]:
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        assert isinstance(call, ast.Call)
        values = tuple(map(ast.literal_eval, call.args))
        named = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (AssertionError, ValueError, SyntaxError) as error:
        raise Misuse(
            f"{shorten(name)}: the arguments {text} must be plain values, written as in (8, bias=False)"
        ) from error
    return values, named


def with_given(function: object, values: tuple[object, ...], named: Mapping[str, object]) -> object:
    """Binds the arguments by functools.partial.  Without arguments the result is `function` itself."""
    if not values and not named:
        return function
    return functools.partial(function, *values, **named) if callable(function) else function


def _attribute(owner: object, qualified: str) -> object:
    return functools.reduce(lambda found, each: getattr(found, each, None), qualified.split("."), owner)


def load_file(path: str) -> ModuleType:
    """Imports a file, unless it was imported before, and returns its module.

    The module gets the name that an import would give it, and a file in a package is imported as a part of the package.
    Two files may have the same module name, for example two files `test_models.py`.  Then the modules of both files
    stay loaded.

    Raises:
        Exception: whatever the file raises.
    """
    file = Path(path).resolve()
    if (loaded := _loaded_from(file)) is not None:
        return loaded
    root = _root_of(file)
    if str(root) not in map(os.path.realpath, sys.path):
        sys.path.append(str(root))  # so that the file finds its neighbours
    for name in _names_of(file):
        return importlib.import_module(name)
    return _execute(file)


def _loaded_from(file: Path) -> ModuleType | None:
    for module in list(sys.modules.values()):
        found = getattr(module, "__file__", None)
        if isinstance(found, str) and found.endswith(file.name) and os.path.realpath(found) == str(file):
            return module
    return None


def _root_of(file: Path) -> Path:
    """Returns the nearest folder above `file` without an __init__.py, which an import needs on Python's path."""
    return next(folder for folder in file.parents if not (folder / "__init__.py").exists())


def _names_of(file: Path) -> Iterator[str]:
    """Yields each module name by which an import finds this file.

    A folder of Python's path that lies within a package gives no name.
    """
    for entry in sys.path:
        folder = Path(entry).resolve()
        if not file.is_relative_to(folder) or (folder / "__init__.py").exists():
            continue
        parts = file.relative_to(folder).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts and all(map(str.isidentifier, parts)) and _finds(".".join(parts), file):
            yield ".".join(parts)


def _finds(name: str, file: Path) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):  # a package on the way is broken, or is no package
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file


def _execute(file: Path) -> ModuleType:
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


Named = Callable[..., object] | str
