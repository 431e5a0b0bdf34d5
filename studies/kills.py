"""Counts the planted defects that the shipped cases of a profile reject: `python -m studies.kills`.

Each defect takes the place of its subject in the property that judges it.  The profile's cases run in their order until
a claim fails.  No other property of a run sees the defect, so the whole profile rejects what these cases reject.  With
`--report`, only cases that a run with a time budget judged run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equivtest.base.profiles import PROFILES
from equivtest.cases.case import Case, to_data
from equivtest.ranks.pool import Pool
from equivtest.report.log import read_begun
from tests.defects.defect import Defect, defects
from tests.gate import cases_for, first_rejection


@dataclass(frozen=True)
class Row:
    """How soon the cases of a profile rejected one defect.

    Attributes:
        visits: Number of cases until the first that a claim rejects, or 0.
        cases: Number of cases that the profile has for that property.
    """

    defect: Defect
    visits: int
    cases: int
    seconds: float

    @property
    def text(self) -> str:
        found = f"case {self.visits}" if self.visits else "NOT REJECTED"
        return f"| {self.defect.name} | {self.defect.replaces} | {found} of {self.cases} | {self.seconds:.1f} |"


def judged_in(report: Path) -> Callable[[Case], bool]:
    """Returns a test if the run of a report judged a case."""
    searched = [each.searched for each in read_begun(report).handovers if each.searched is not None]
    judged = {_key(record.case) for one in searched for record in one.records}
    return lambda case: _key(to_data(case)) in judged


def _key(data: Mapping[str, Any]) -> str:
    return json.dumps(data, sort_keys=True)


def summary_of(rows: Sequence[Row]) -> Iterable[str]:
    """Yields a table of the rejected defects by subject, and lines on the time until the first rejection."""
    by_subject = defaultdict(list)
    for row in rows:
        by_subject[row.defect.replaces].append(row)
    yield from ("", "| subject | rejected | of | median of cases | most cases |", "| --- | --- | --- | --- | --- |")
    for subject, group in sorted(by_subject.items()):
        visits = [row.visits for row in group if row.visits] or [0]
        yield f"| {subject} | {len(visits)} | {len(group)} | {statistics.median(visits):g} | {max(visits)} |"
    seconds = sorted((row.seconds for row in rows if row.visits), reverse=True)
    worst = ", ".join(f"{each:.1f}" for each in seconds[:10])
    yield f"\n{sum(row.visits > 0 for row in rows)} of {len(rows)} are rejected"
    yield f"Seconds until the first rejection: median {statistics.median(seconds):.1f}, worst ten {worst}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.kills")
    parser.add_argument("--only", default="", help="Defects of subjects whose name contains one of these, by comma.")
    parser.add_argument("--profile", default="gate", choices=("smoke", "gate", "conformance"))
    parser.add_argument("--report", type=Path, help="Folder of a run's report: only cases that this run judged.")
    options = parser.parse_args()
    only, is_judged = options.only.split(","), judged_in(options.report) if options.report else lambda case: True
    print("| defect | subject | rejected by | seconds |\n| --- | --- | --- | --- |")
    rows = []
    with Pool() as pool:
        for defect in (each for each in defects() if any(part in each.replaces for part in only)):
            begun_s = time.monotonic()
            cases = [case for case in cases_for(defect, PROFILES[options.profile], pool) if is_judged(case)]
            visits = first_rejection(defect, cases, pool)
            rows.append(row := Row(defect, visits, len(cases), time.monotonic() - begun_s))
            print(row.text, flush=True)
    print(*summary_of(rows), sep="\n")


if __name__ == "__main__":
    main()
