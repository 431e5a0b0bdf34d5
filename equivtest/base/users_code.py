"""Separates your own Python files from files of equivtest, Python and installed packages."""

from __future__ import annotations

import hashlib
import re
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Folders of Python and of installed packages.  The prefix of Python or of an environment may contain your code."""
SITES = ("site-packages", "dist-packages")
"""Names of folders with installed packages, such as in a user's home or in the Python below an environment."""

_FRAME = re.compile(r'  File "(.+)", line (\d+), in (\S+)')


_others: set[object] = set()
"""Values of `__file__` that are not the user's.  They are kept, because each call would check thousands of them."""


def imported_files() -> tuple[str, ...]:
    return users_files(list(sys.modules))


@cache
def files_imported_first() -> tuple[str, ...]:
    """Returns the result of `imported_files` at the first call in this process, or in the process that forked it."""
    return imported_files()


def imported_after(last: str) -> list[str]:
    """Returns the names of all modules that were imported after the module `last`, the newest first.

    The function reads no name of an earlier module. A forked process copies each page with an object that it reads,
    because Python counts references. Reading all modules was half of the pages that a rank copied.
    """
    return list(takewhile(last.__ne__, reversed(sys.modules)))


def users_files(modules: Sequence[str]) -> tuple[str, ...]:
    """Returns the files of these modules that are your files, in alphabetical order."""
    found = {getattr(sys.modules.get(name), "__dict__", {}).get("__file__") for name in modules}
    users = sorted(file for file in found - _others if isinstance(file, str) and is_users(file))
    _others.update(found.difference(users))
    return tuple(users)


@cache
def is_users(file: str) -> bool:
    """True if the file is a Python file of yours, not a file of equivtest, Python or an installed package."""
    path = Path(file)
    is_installed = any(site in path.parts for site in SITES)
    return path.suffix == ".py" and not is_installed and not any(map(path.is_relative_to, (PACKAGE, *INSTALLED)))


def users_frames(lines: Sequence[str]) -> dict[int, re.Match[str]]:
    """Returns line number -> match (file, line, function) for each frame of a traceback that is in your code."""
    matches = {number: _FRAME.fullmatch(line) for number, line in enumerate(lines)}
    return {number: match for number, match in matches.items() if match is not None and is_users(match[1])}


def digest_of(path: str) -> str:
    """Returns 16 digits of the file's SHA-256, or '' if the file cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError:
        return ""
