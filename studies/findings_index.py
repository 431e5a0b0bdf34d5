"""Writes the tables of findings/README.md and of docs/explanation/found.md from the findings and the known failures.

python -m studies.findings_index            prints the index
python -m studies.findings_index --write    writes the tables into both pages
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from equivtest.search.known import SHIPPED

FOLDER = Path(__file__).parents[1] / "findings"
INDEX = FOLDER / "README.md"
FOUND = FOLDER.parent / "docs/explanation/found.md"
BEGIN, END = "<!-- python -m studies.findings_index --write -->\n", "<!-- end -->\n"
FIELDS = ("Project", "Releases", "Effect", "Upstream")
EFFECTS = ("silent", "raised", "hang", "crash", "no defect")
HEADER = "| finding | project | releases | effect | known failures | reported upstream |\n|---|---|---|---|---|---|\n"


@dataclass(frozen=True)
class Finding:
    path: Path
    number: int
    title: str
    fields: dict[str, str]

    @property
    def effects(self) -> list[str]:
        return self.fields["Effect"].split(", ")

    @property
    def reports(self) -> list[str]:
        """Links to upstream reports of this defect."""
        upstream = self.fields["Upstream"]
        return [] if upstream.startswith("no") else re.findall(r"\[[^]]+\]\([^)]+\)", upstream)


def read(path: Path) -> Finding:
    """Reads a finding.  Raises ValueError if the first lines are not in the required form."""
    first, _, *lines = path.read_text("utf-8").split("\n")
    title = re.fullmatch(r"# (\d+)\. (.+)", first)
    names = [re.fullmatch(r"- \*\*(\w+)\*\*: (.+)", line) for line in lines[: len(FIELDS)]]
    if title is None or tuple(found and found[1] for found in names) != FIELDS:
        raise ValueError(f"{path.name}: must begin with '# NUMBER. TITLE' and the fields {', '.join(FIELDS)}")
    return Finding(path, int(title[1]), title[2], {found[1]: found[2] for found in names if found})


def read_all() -> list[Finding]:
    return sorted((read(path) for path in FOLDER.glob("[0-9]*.md")), key=lambda finding: finding.number)


def known_failures() -> list[dict[str, object]]:
    """Returns every entry of the shipped known failures, including entries about releases that are not installed."""
    entries: list[dict[str, object]] = tomllib.loads(SHIPPED.read_text("utf-8"))["known_failure"]
    return entries


def table() -> str:
    subjects: dict[int, Counter[str]] = {finding.number: Counter() for finding in read_all()}
    for entry in known_failures():
        for number in entry.get("findings", ()):
            subjects[number][str(entry["subject"])] += 1
    return HEADER + "".join(_line(finding, subjects[finding.number]) for finding in read_all())


def _line(finding: Finding, subjects: Counter[str]) -> str:
    entries = ", ".join(f"`{name}` {count}" for name, count in sorted(subjects.items()))
    cells = (
        f"[{finding.number}. {finding.title}]({finding.path.name})",
        finding.fields["Project"],
        finding.fields["Releases"],
        finding.fields["Effect"],
        entries or "none",
        ", ".join(finding.reports) or finding.fields["Upstream"].partition(" (")[0].partition(":")[0],
    )
    return f"| {' | '.join(cells)} |\n"


def by_project_and_effect(*, links: bool) -> str:
    """Returns a table with a row per project and a column per effect.  A cell has the findings' links or their number.

    A finding with several effects is in the cell of each.
    """
    findings = read_all()
    rows = []
    for project, total in Counter(finding.fields["Project"] for finding in findings).most_common():
        own = [finding for finding in findings if finding.fields["Project"] == project]
        cells = [[finding for finding in own if effect in finding.effects] for effect in EFFECTS]
        texts = [", ".join(f"[{each.number}]({each.path.name})" for each in cell) for cell in cells]
        rows.append([project, str(total), *(texts if links else (str(len(cell)) for cell in cells))])
    header = f"| project | findings | {' | '.join(EFFECTS)} |\n|{'---|' * (2 + len(EFFECTS))}\n"
    return header + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def indexed(text: str) -> str:
    return _filled(text, f"{by_project_and_effect(links=True)}\n{table()}")


def counted(text: str) -> str:
    return _filled(text, by_project_and_effect(links=False))


def _filled(text: str, tables: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + tables + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        INDEX.write_text(indexed(INDEX.read_text("utf-8")), "utf-8")
        FOUND.write_text(counted(FOUND.read_text("utf-8")), "utf-8")
    else:
        sys.stdout.write(table())
