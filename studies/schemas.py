"""Writes the JSON schemas of the files that equivtest writes: `python -m studies.schemas --write`.

Each schema comes from the type by which equivtest writes the file, and lies in docs/reference/schemas/. The docstring
of the type describes the fields.  Without --write, the exit code is 1 if a published schema differs from its type.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from equivtest.report.compare import Comparison
from equivtest.report.handover import Record
from equivtest.report.log import Entry, Environment
from equivtest.search.replay import ReplayFile

FOLDER = Path(__file__).resolve().parents[1] / "docs/reference/schemas"
TYPES = {
    "verdicts.jsonl": Record,
    "run.jsonl.gz": Entry,
    "environment.json": Environment,
    "failures.json": ReplayFile,
    "compare.json": Comparison,
}
"""Name of a file -> type of its content.  For a file of JSON lines this is the type of one line."""


def schema_of(name: str) -> dict[str, Any]:
    (root,), components = msgspec.json.schema_components([TYPES[name]], ref_template="#/$defs/{name}")
    for component in components.values():
        component.pop("description", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name, **root, "$defs": components}


def text_of(name: str) -> str:
    return json.dumps(schema_of(name), indent=1) + "\n"


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.schema.json"


def main(arguments: list[str]) -> int:
    if "--write" in arguments:
        FOLDER.mkdir(exist_ok=True)
        for name in TYPES:
            path_of(name).write_text(text_of(name))
    different = [name for name in TYPES if not path_of(name).exists() or path_of(name).read_text() != text_of(name)]
    for name in different:
        print(f"{path_of(name)} differs from its type: run python -m studies.schemas --write")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
