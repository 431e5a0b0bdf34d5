"""Prints a table of the collectives that claims check, from audits of runs: `python -m studies.client_audit REPORT...`.

Reads audit.csv from folders that `--report` has written.  Properties share a row if their subjects call the same
collectives and their claims detected faults in the same collectives.  If several reports have a property, the last one
counts.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from equivtest.search.audited import decisive

HEAD = "| seen by a claim | seen by none | clients |\n|---|---|---|"
WHERE = " in the "


@dataclass
class Audited:
    """The result of the audit of one property.

    Attributes:
        called: Collectives that the subject calls, such as 'all_reduce in the forward'.
        seen: Collectives for which some claim rejected a decisive fault.
        words: The reason if `seen` is empty.
    """

    called: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)
    words: str = ""

    @property
    def row(self) -> tuple[str, str]:
        if not self.called:
            return self.words, ""
        return in_short(self.seen), in_short(self.called - self.seen)


def read(report: Path) -> dict[str, Audited]:
    found: dict[str, Audited] = defaultdict(Audited)
    with (report / "audit.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            audited, site = found[row["property"]], row["collective"]
            if not row["fault"]:
                audited.words = row["by"]
                continue
            audited.called.add(site)
            if int(row["rejected"]) and row["fault"] in decisive(site.partition(WHERE)[0]):
                audited.seen.add(site)
    return dict(found)


def in_short(sites: Iterable[str]) -> str:
    """Joins collectives with their phases: 'all_reduce forward and backward, broadcast forward on tp'."""
    phases: dict[tuple[str, str], list[str]] = defaultdict(list)
    for site in sorted(sites, key=lambda site: (site.partition(WHERE)[0], "backward" in site)):
        kind, _, where = site.partition(WHERE)
        phase, *group = where.split(" ", 1)
        phases[kind, " ".join(["", *group])].append(phase)
    return ", ".join(f"{kind} {' and '.join(found)}{group}" for (kind, group), found in phases.items())


def table(audits: Mapping[str, Audited]) -> str:
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, audited in sorted(audits.items()):
        rows[audited.row].append(f"`{name}`")
    ordered = sorted(rows.items(), key=lambda item: (-len(item[1]), item[0]))
    return "\n".join([HEAD, *(f"| {seen} | {unseen} | {' '.join(names)} |" for (seen, unseen), names in ordered)])


if __name__ == "__main__":
    every: dict[str, Audited] = {}
    for folder in sys.argv[1:]:
        every |= read(Path(folder))
    sys.stdout.write(f"{table(every)}\n")
