"""Writes files so that a reader always sees a complete file."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

PART = re.compile(r"\.equivtest-\d+\.part")
"""Pattern of the name that a file has while it is written.  If the process is killed meanwhile, such a file remains."""


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file beside `path` and renames it to `path` once it is complete.

    Raises:
        OSError: the file cannot be written. `path` keeps its old contents.
    """
    part = path.with_name(f".equivtest-{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
