"""Compares honest and faulty backends by `equivtest compare`: python -m studies.compared_faults [FAULT ...].

Each run is `equivtest run --profile smoke --subjects collectives` on a planted backend, from an empty folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.programs.planted import FAULT

ROOT = Path(__file__).parents[1]
FAULTS = ("swapped_gather", "drops_rank", "wrong_on_one_rank", "average_is_sum", "ends_a_rank", "refuses")
"""A wrong order, a rank left out in one dtype, one wrong rank, a wrong reduction, a lost rank, a refusal."""

RUN = (
    "run", "--profile=smoke", "--subjects=collectives", "--backend=planted", "--import=tests.programs.unusual",
)  # fmt: skip


def equivtest(folder: Path, *arguments: str, fault: str = "") -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "equivtest.cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), FAULT: fault},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def main(*faults: str) -> int:
    """Prints a row for each fault.  Returns 1 if `compare` calls an honest run worse, or a faulty run not worse."""
    wrong = 0
    print("| backend | code of run | code of compare | worse | no longer judged |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        equivtest(folder, *RUN, "--report=before")
        for fault in ("", *(faults or FAULTS)):
            code, _ = equivtest(folder, *RUN, f"--report={fault or 'honest'}", fault=fault)
            compared, text = equivtest(folder, "compare", "before", fault or "honest", "--fail-on=worse", "--json")
            wrong += compared != int(bool(fault))
            changes = json.loads(text)["changes"] if text else []
            said = (_named(changes, "worse"), _named(changes, "no longer judged"))
            print(f"| {fault or 'honest'} | {code} | {compared} | {' | '.join(said)} |", flush=True)
    return int(wrong > 0)


def _named(changes: list[dict[str, Any]], category: str) -> str:
    found = [each for each in changes if each["category"] == category]
    words = [f"{each['claim'] or each['example']}: {each['old']} to {each['new']} ({each['number']})" for each in found]
    return "; ".join(words) or "-"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
