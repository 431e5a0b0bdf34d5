"""Reads files of JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def lines_of(*files: Path) -> list[Any]:
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
