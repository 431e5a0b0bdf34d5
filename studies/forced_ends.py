"""Prints what each forced end of a run leaves: `python -m studies.forced_ends 'controller, SIGTERM'`, or all rows."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.ranks.end_cells import cells, run_cell

LIMIT_S = 2.0  # after the end, for nothing to be left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("filter", nargs="?", default="", help="part of the name of the rows to be run")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a run under way is ended with this one
    wanted = [cell for cell in cells() if parser.parse_args().filter in str(cell)]
    print(f"{'what is ended, how, while its ranks':44} {'to end':>7} {'till nothing left':>18}  it says", flush=True)
    bad = 0
    for cell in wanted:
        try:
            with tempfile.TemporaryDirectory() as folder:
                end = run_cell(cell, Path(folder))
        except (AssertionError, subprocess.TimeoutExpired) as error:
            bad += 1
            print(f"{cell!s:44} !", error, sep="\n  ! ", flush=True)
            continue
        problems = [*end.problems, *["slow"] * (end.left_s > LIMIT_S and cell.what != "server")]
        bad += bool(problems)
        row = f"{cell!s:44} {end.to_end_s:5.2f} s {end.left_s:16.2f} s {'!' if problems else ' '} {end.said[:60]}"
        print(row, *problems, sep="\n  ! ", flush=True)
    print(f"{len(wanted)} forced ends, {bad} not as they should be (a next run each; limit {LIMIT_S:g} s)")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
