"""Writes the files of `equivtest init`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from equivtest.base.importing import suggestion
from equivtest.errors import Misuse, reason_of, shorten

FOLDER = Path(__file__).parent

KINDS = ("tensor-parallel", "data-parallel", "step", "backend")
"""Kinds of test files.  The folder of this module has the file `test_KIND.py` of each kind."""

JOBS = {"github.yml": ".github/workflows/equivtest.yml", "gitlab.yml": ".gitlab/equivtest.yml"}
"""Template of each CI service -> path of its job in a repository."""


def write_files(folder: Path, kind: str, manifests: Mapping[str, str] = MappingProxyType({})) -> list[Path]:
    """Writes a test file of this kind and the jobs that run it.

    Args:
        manifests: Name -> text of a backend's manifest, which the jobs pass to the run.

    Raises:
        Misuse: There is no such kind, a file already exists, or a file cannot be written. No file is overwritten.
    """
    if kind not in KINDS:
        raise Misuse(f"--kind: there is no {kind!r}: {suggestion(kind, KINDS)}")
    test = f"test_{kind.replace('-', '_')}.py"
    texts = {folder / test: (FOLDER / test).read_text("utf-8")}
    run = " ".join([test, *(f"--manifest {name}" for name in manifests)])
    texts |= {
        folder / path: (FOLDER / name).read_text("utf-8").replace("TEST_FILE", run) for name, path in JOBS.items()
    }
    texts |= {folder / name: text for name, text in manifests.items()}
    existing = next((path for path in texts if os.path.exists(path)), None)
    if existing is not None:
        raise Misuse(f"{shorten(str(existing))} exists: move it, or start in another folder; nothing was written")
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, text)
        except (OSError, ValueError) as error:
            raise Misuse(f"{shorten(str(path))} cannot be written: {reason_of(error)}") from error
    return list(texts)


def _write(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
