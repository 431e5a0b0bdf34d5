"""Compares the judgements of two runs draw by draw: `python -m studies.same_records REPORT REPORT`.

Reads verdicts.jsonl from two folders that `--report` has written, with lines in any order.  For each
draw it compares subject, case, seed, verdicts and margins.  Prints how many draws each has and the first few that the
other lacks; status 1 if there are some.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from studies.json_lines import lines_of

TIMED = "busy_s"
NUM_SHOWN = 10


def records(report: Path) -> Counter[str]:
    """The draws of a report, less how long they took."""
    draws = lines_of(report / "verdicts.jsonl")
    return Counter(
        json.dumps({name: value for name, value in draw.items() if name != TIMED}, sort_keys=True) for draw in draws
    )


def main(reports: list[str]) -> int:
    first, second = (records(Path(report)) for report in reports)
    print(f"{first.total()} and {second.total()} draws")
    for name, others in ((reports[0], first - second), (reports[1], second - first)):
        print(f"{others.total()} of {name} alone")
        for text in sorted(others)[:NUM_SHOWN]:
            print(f"  {text}")
    return int(first != second)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
