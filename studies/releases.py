"""What other releases of torch get wrong: known failures tried on the installed one, and tables of docs/releases.md.

    python -m studies.releases try FILE
    python -m studies.releases table REPORT [REPORT ...] --tried FILE [FILE ...] --swept FILE [FILE ...] [--write]

The first runs the smallest case of each known failure of torch, whatever releases its entry names, and writes to FILE,
a line each, how it ended on the installed one.  The second prints, or puts into docs/releases.md, what reports of the
gate (`--report`), such files, and those of `python -m studies.operator_coverage` say of several releases.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from equivtest.check import judge
from equivtest.errors import Misuse
from equivtest.property import Property
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from equivtest.search.known import SHIPPED, KnownFailure, read_entries
from equivtest.verdicts.verdict import FAILING
from studies.findings_index import read_all
from studies.json_lines import lines_of
from studies.operator_releases import beside, swept

PAGE = Path(__file__).parents[1] / "docs" / "releases.md"
HEADS = {"claims": ("subject", "claim"), "findings": ("finding",)}
"""Name of a table, as it stands in the comments around it -> what its first columns are."""

Cells = dict[tuple[str, ...], dict[str, str]]
"""Row of a table -> release -> what stands there."""
Rows = Callable[[dict[str, Any]], Iterable[tuple[tuple[str, ...], str]]]
"""Gives the rows that a line of verdicts.jsonl counts in, each with the kind of a verdict."""


def properties_of(entry: KnownFailure) -> list[Property]:
    """The shipped properties that judge the entry's claim of its subject."""
    claims = [(prop, {claim.name for claim in prop.claims}) for prop in shipped().values()]
    return [prop for prop, names in claims if prop.subject == entry.subject and entry.claim in names]


def tried(entry: KnownFailure, pool: Pool) -> str:
    """How the entry's smallest case ends on that claim: the kinds of its verdicts."""
    claims = [claim for claim in properties_of(entry)[0].claims if claim.name == entry.claim]
    try:
        kinds = {verdict.kind for verdict in judge(entry.subject, entry.case, pool, claims)}
    except Misuse as error:
        return f"cannot be tried: {error}"
    if entry.kind in kinds:
        return "fails"
    failing = sorted(kinds.intersection(FAILING))
    return f"fails as {', '.join(failing)}" if failing else "holds" if "holds" in kinds else ", ".join(sorted(kinds))


def try_all(file: Path) -> None:
    """Adds to the file a line for each known failure of torch that a shipped property judges, unless it has that."""
    done = {line["id"] for line in lines_of(file)} if file.exists() else set()
    with Pool() as pool, file.open("a", encoding="utf-8") as out:
        for entry in read_entries(SHIPPED):
            is_of_torch = all(name == "torch" for name, _ in entry.versions)
            if entry.id not in done and is_of_torch and properties_of(entry):
                line = {"torch": release(torch.__version__), "id": entry.id, "findings": entry.findings}
                out.write(json.dumps({**line, "case": repr(entry.case), "ended": tried(entry, pool)}) + "\n")
                out.flush()


def release(version: str) -> str:
    """'2.13.0' for '2.13.0+cpu'."""
    return Version(version).public


def by_claim(record: dict[str, Any]) -> Iterable[tuple[tuple[str, ...], str]]:
    """(subject, claim) and the kind of each verdict of a line of verdicts.jsonl."""
    for claim, kind in record["verdicts"].items():
        yield (f"`{record['subject']}`", f"`{claim}`"), kind


def in_words(kinds: Counter[str]) -> str:
    """'holds', or how many verdicts did not, by kind."""
    total = kinds.total()
    others = {kind: num for kind, num in kinds.items() if kind not in ("holds", "inconclusive")}
    if not others:
        return "holds" if kinds["holds"] else "open"
    return ", ".join(f"{kind.replace('_', ' ')} {num} of {total}" for kind, num in sorted(others.items()))


def counted(reports: Iterable[Path], rows_of: Rows) -> Cells:
    """What the reports say, row by row; raises ValueError where a report is not complete."""
    cells: Cells = defaultdict(dict)
    for report in reports:
        environment = json.loads((report / "environment.json").read_text(encoding="utf-8"))
        if not environment["complete"]:
            raise ValueError(f"{report}: not complete: {environment['state']}")
        kinds: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        for line in lines_of(report / "verdicts.jsonl"):
            for row, kind in rows_of(line):
                kinds[row][kind] += 1
        for row, found in kinds.items():
            cells[row][release(environment["torch"])] = in_words(found)
    return cells


def of_findings(files: Iterable[Path]) -> Cells:
    """How the smallest cases of a finding's known failures end on each release."""
    ended: defaultdict[tuple[str, ...], defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    titles = {each.number: f"[{each.number}. {each.title}](../findings/{each.path.name})" for each in read_all()}
    for file in files:
        for line in lines_of(file):
            for number in line["findings"]:
                ended[(titles[number],)][line["torch"]].append(line["ended"])
    return {
        row: {name: ends_in_words(Counter(ends)) for name, ends in of_release.items()}
        for row, of_release in ended.items()
    }


def ends_in_words(ends: Counter[str]) -> str:
    """'3 of 4', or 'none', and of how many others nothing is said: they are refused, or fail in another way."""
    fails = f"{ends['fails']} of {ends.total()}" if ends["fails"] else "none"
    others = {"not supported": ends["not_supported"], "refused": ends["inconclusive"]}
    others["otherwise"] = sum(num for end, num in ends.items() if end.startswith("fails as"))
    return ", ".join([fails, *(f"{num} {how}" for how, num in others.items() if num)])


def table(name: str, cells: Cells) -> str:
    """Rows in which a release says otherwise than `holds`, and how many are left out since none does."""
    releases = sorted({each for of_release in cells.values() for each in of_release}, key=Version)
    rows = {row: found for row, found in cells.items() if set(found.values()) - {"holds", "open"}}
    lines = [(*HEADS[name], *releases), ("---",) * (len(HEADS[name]) + len(releases))]
    lines += [(*row, *(found.get(each, "-") for each in releases)) for row, found in rows.items()]
    alike = (
        f"{len(cells) - len(rows)} more rows hold, or are open, on each of them.\n\n" if len(rows) < len(cells) else ""
    )
    return alike + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def put(page: str, name: str, text: str) -> str:
    """The page with the table of that name as it must be; raises ValueError where the page has no place for it."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->\n)", flags=re.S)
    written, num = pattern.subn(lambda found: f"{found[1]}\n{text}\n{found[2]}", page)
    if num != 1:
        raise ValueError(f"{PAGE.name} has {num} tables of {name} where one must be: <!-- {name} -->, <!-- end -->")
    return written


def main(texts: list[str]) -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("try").add_argument("file", type=Path)
    printing = commands.add_parser("table")
    printing.add_argument("reports", nargs="*", type=Path)
    printing.add_argument("--tried", nargs="*", type=Path, default=[])
    printing.add_argument("--swept", nargs="*", type=Path, default=[])
    printing.add_argument("--write", action="store_true")
    given = parser.parse_args(texts)
    warnings.simplefilter("ignore")
    if given.command == "try":
        torch.set_num_threads(1)
        try_all(given.file)
        return
    cells = {"claims": counted(given.reports, by_claim), "findings": of_findings(given.tried)}
    tables = {name: table(name, found) for name, found in cells.items() if found}
    if given.swept:
        tables["operators"] = beside(swept(given.swept))
    if given.write:
        page = PAGE.read_text(encoding="utf-8")
        for name, text in tables.items():
            page = put(page, name, text)
        PAGE.write_text(page, encoding="utf-8")
        return
    for name, text in tables.items():
        print(f"{name}\n\n{text}")


if __name__ == "__main__":
    main(sys.argv[1:])
