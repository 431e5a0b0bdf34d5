"""Files that are whole whenever somebody reads them."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

PART = re.compile(r"\.equivtest-\d+\.part")
"""Name of a file that is being written; one is left where the process is killed meanwhile."""


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file beside `path` and has it take that place once all is there.

    Raises:
        OSError: it cannot be written; what `path` held before is left.
    """
    part = path.with_name(f".equivtest-{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
