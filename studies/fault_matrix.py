"""Prints how every fault of a rank is named: `python -m studies.fault_matrix --repeat 5`.

Each fault occurs on each rank and at each moment.  No fault may last more than a second longer than its limit, without
the time for which the machine stood still.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence

from equivtest.base import limits
from equivtest.ranks.pool import Pool
from studies.standstill import watching
from tests.ranks.burners import burning
from tests.ranks.fault_cells import VISIT, Cell, Result, cells, run_cell


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=1, help="runs of every cell")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further run after so long")
    parser.add_argument("--only", default="", help="faults, by comma")
    parser.add_argument("--skip", default="", help="faults, by comma")
    parser.add_argument("--burners", type=int, default=0, help="other processes that keep cores busy meanwhile")
    chosen = parser.parse_args()
    allow_for(chosen.burners)
    only, skip = chosen.only.split(","), chosen.skip.split(",")
    wanted = [cell for cell in cells() if (not chosen.only or cell.fault in only) and cell.fault not in skip]
    results: dict[Cell, list[Result]] = defaultdict(list)
    begun_s = time.monotonic()
    with burning(chosen.burners), watching() as standstills, Pool(visit=VISIT) as pool:
        for number in range(chosen.repeat):
            for cell in wanted if time.monotonic() - begun_s < chosen.seconds else []:
                result = run_cell(pool, cell, standstills.seconds)
                results[cell].append(result)
                notes = result.problems or (f"late, as the machine stood still: {result}",) * (result.still_s > 0)
                for note in notes:
                    print(f"run {number + 1}, {cell.id}: {note}", file=sys.stderr, flush=True)
    every = [result for found in results.values() for result in found]
    bad = sum(bool(result.problems) for result in every)
    late = sum(result.still_s > 0 and not result.problems for result in every)
    print_table(results)
    print(
        f"\n{len(every)} runs of {len(wanted)} cells in {time.monotonic() - begun_s:.0f} s; "
        f"{bad} not as they should be; {late} late, as the machine stood still"
    )
    return int(bad > 0)


def allow_for(num_burners: int) -> None:
    """Scales every time limit that decides a verdict with the load on the cores, because a slow rank is not wrong."""
    slowdown = 1 + 2 * num_burners / (os.cpu_count() or 1)
    for name in ("GRACE_S", "STACKS_S", "STOP_S"):
        setattr(limits, name, slowdown * getattr(limits, name))


def print_table(results: dict[Cell, list[Result]]) -> None:
    """Prints a row per fault and moment, and a column per culprit: median seconds, and ! if a run went wrong."""
    columns = list(dict.fromkeys(cell.column for cell in sorted(results, key=lambda cell: cell.column)))
    print(f"{'fault':26}" + "".join(f"{column:>8}" for column in columns) + "  named")
    rows = dict.fromkeys((cell.fault, cell.moment) for cell in results)
    for fault, moment in rows:
        row = {cell.column: found for cell, found in results.items() if (cell.fault, cell.moment) == (fault, moment)}
        shown = "".join(f"{_show(row.get(column, [])):>8}" for column in columns)
        print(f"{fault + ', ' + moment:26}{shown}  {_names([result for found in row.values() for result in found])}")


def _show(found: Sequence[Result]) -> str:
    if not found:
        return ""
    bad = sum(bool(result.problems) for result in found)
    return f"{statistics.median(result.seconds for result in found):.2f}{f' {bad}!' if bad else ''}"


def _names(found: Sequence[Result]) -> str:
    """Returns the causes as messages name them, without the rank, which the column says."""
    names = dict.fromkeys(result.named.partition(" ")[2].partition(" ")[2][:50].split("\n")[0] for result in found)
    return " | ".join(name or "passes" for name in names)


if __name__ == "__main__":
    sys.exit(main())
