"""Finds the user's own files among the imported modules: neither of this package nor of an installed one."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def imported_files() -> tuple[str, ...]:
    """Returns the path of each file of the user's that this process has imported."""
    found = {getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())}
    return tuple(sorted(file for file in found if isinstance(file, str) and is_users(file)))


@cache
def is_users(file: str) -> bool:
    """True if the path is of a Python file that is the user's own."""
    path = Path(file)
    inside = (PACKAGE, Path(sys.base_prefix), Path(sys.prefix))
    is_installed = "site-packages" in path.parts or any(path.is_relative_to(folder) for folder in inside)
    return path.suffix == ".py" and not is_installed


def digest_of(path: str) -> str:
    """Returns 16 digits of the file's SHA-256; '' if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError:
        return ""
