"""Gives the process of a command a fixed hash seed."""

from __future__ import annotations

import os
import sys


def fix_hash_seed() -> None:
    """Restarts this process with hash seed 0, unless PYTHONHASHSEED sets another seed.

    With equal seeds, sets of strings have the same order in the reference and in the ranks.  Call this function before
    any slow import, because the new process repeats all imports.
    """
    if "PYTHONHASHSEED" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
