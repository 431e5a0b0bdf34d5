"""Recognizes files of other debugging tools, and describes what these files lack for a verdict."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from equivtest.base import limits
from equivtest.captured.format.tensor_file import open_plainly
from equivtest.errors import Misuse, shorten

SGLANG_FILE = re.compile(r"(?=(?:.*___)?name=)(?=(?:.*___)?dump_index=\d)\w+=.*\.pt", flags=re.A)
"""Pattern of the name of a file that SGLang's dumper writes: its tags, separated by three underscores.

The order of the tags differs between versions. Each file is a pickle of {"value": ..., "meta": ...}.  Source:
sglang/python/sglang/srt/debug_utils/dumper.py (commit 00d35548), _Dumper._dump_single and _format_tags.
"""

DEBUG_MODE_LINE = re.compile(rb"^ {2,}\w+::[\w.]+\(.*\bd?t(?:\$\d+)?: \w+\[", flags=re.A | re.M)
"""Pattern of the beginning of an operator's line in a log of DebugMode.

A line has the operator's name, the shape, dtype and placements of each tensor, and with log_tensor_hashes one number
for each tensor.  Source: torch/utils/_debug_mode (2.13.0), DebugMode.debug_string and _utils._tensor_debug_string.
"""

WAY_OUT = "put equivtest.capture(model, FOLDER) around the step, and judge that folder"


def describe_dump(path: Path, files: Sequence[Path]) -> str:
    """Returns which tool wrote a file or folder, what it lacks for a verdict, and a remedy, or ''.

    Args:
        files: The files in the folder `path`, or `path` itself if it is a file.
    """
    named = shorten(str(path))
    if dumped := next((file.name for file in files if SGLANG_FILE.fullmatch(file.name)), ""):
        return (
            f"{named} is a dump of SGLang's dumper ({shorten(dumped)}): its files are pickles, which equivtest never "
            f"loads, and no manifest lists the model's inputs, parameters and layouts. Instead, {WAY_OUT}"
        )
    if any(_is_log_of_debug_mode(file) for file in files[: limits.OTHER_FILES]):
        return (
            f"{named} is a log of torch's DebugMode: it has shapes of tensors, and at most one hash of each, but no "
            f"values to judge. Instead, {WAY_OUT}"
        )
    return ""


def _is_log_of_debug_mode(path: Path) -> bool:
    try:
        with open_plainly(path) as file:
            return bool(DEBUG_MODE_LINE.search(file.read(limits.OTHER_BYTES)))
    except (Misuse, OSError):
        return False
