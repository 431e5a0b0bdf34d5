"""Writes the files of --report: JSON lines for programs, text for logs and HTML for people."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from equivtest.base.files import write_whole
from equivtest.base.profiles import PROFILES
from equivtest.errors import BrokenSetup
from equivtest.report import audits, cells, drawn, margins
from equivtest.report.handover import KnownState, Record
from equivtest.report.parts import PartTree
from equivtest.report.results import Results
from equivtest.report.tally import Tally
from equivtest.report.text import headline, summarize, totals
from equivtest.verdicts.verdict import CONCLUSIVE

TEMPLATE, PICTURE = "report.html.jinja", "picture.html.jinja"


def write_report(
    directory: Path,
    environment: Mapping[str, Any],
    results: Results,
    headlines: Sequence[str] = (),
) -> None:
    """Writes every file of the report except the log, and except junit.xml, which pytest writes.

    Args:
        headlines: Reasons, other than failing claims, why the run is red.

    Raises:
        BrokenSetup: a file cannot be written.
    """
    seconds = float(environment["seconds"])
    tallies, known, audited = results.ordered(), results.ordered_known(), results.ordered_audits()
    profile = PROFILES[environment["profile"]]
    summary = summarize(
        tallies,
        seconds=seconds,
        known=known,
        audits=audited,
        wants_cells=profile.per_cell > 0,
        headlines=headlines,
        left_out=environment.get("left_out", ()),
        is_first_look=profile.is_first_look,
        levels=environment.get("levels", ()),
    )
    if profile.audits_alone:
        summary = [*headlines, *audits.table(audited)]
    first = headline(environment, tallies)
    texts = {
        "verdicts.jsonl": "".join(f"{line}\n" for line in sorted(map(_as_line, results.records))),
        "summary.txt": "".join(f"{line}\n" for line in [*([first, ""] if first else []), *summary]),
        "cells.csv": cells.as_csv(tallies),
        "audit.csv": audits.as_csv(audited),
        "environment.json": json.dumps(environment, indent=2) + "\n",
        "report.html": as_html(environment, tallies, known, headlines),
    }
    _write(directory, texts)


def _as_line(record: Record) -> str:
    return json.dumps(msgspec.to_builtins(record))


def begin_report(directory: Path, environment: Mapping[str, Any]) -> None:
    """Writes a report on a begun run, in case the run is killed.  Raises BrokenSetup if a file cannot be written."""
    texts = {
        "summary.txt": f"{headline(environment, ())}\n",
        "environment.json": json.dumps(environment, indent=2) + "\n",
        "report.html": as_html(environment, (), ()),
    }
    _write(directory, texts)


def _write(directory: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_whole(directory / name, text.encode())
        except OSError as error:
            raise BrokenSetup(f"cannot write {directory / name}: {error.strerror or error}") from error


def as_html(
    environment: Mapping[str, Any],
    tallies: Sequence[Tally],
    known: Sequence[KnownState],
    headlines: Sequence[str] = (),
) -> str:
    """Returns the report as one HTML page without links to other files. Every value is escaped."""
    return _rendered(
        TEMPLATE,
        environment=environment,
        identity=identity(environment),
        headlines=headlines,
        totals="; ".join(totals(tallies, float(environment["seconds"]))),
        headline=headline(environment, tallies),
        properties=[
            {
                "tally": tally,
                "claims": [(result, tally.kinds.get(result.claim, {})) for result in tally.claims()],
                "grid": cell_grid(tally),
                "matrix": tally.covered.matrix(),
                "thinnest": cells.in_words(tally),
                "margins": plotted(tally),
                "parts": tally.parts.rows(),
            }
            for tally in tallies
        ],
        known=known,
        margins_head=margins.HEAD[: margins.NUM_PLAIN],
        plot=(drawn.WIDTH, drawn.HEIGHT),
        pictures_of=drawn.pictures_of,
        overview=overview(tallies),
        unsupported=[(tally, *row) for tally in tallies for row in unsupported_cells(tally)],
        declined=[(tally, *row) for tally in tallies for row in tally.declined.most_common()],
    )


def identity(environment: Mapping[str, Any]) -> str:
    commit = str(environment.get("equivtest_commit") or "")[:12]
    words = {
        "equivtest": f"equivtest {{}}{f' ({commit})' * bool(commit)}",
        "torch": "torch {}",
        "backend": "backend {}",
        "device": "device {}",
        "profile": "profile {}",
        "started": "began {}",
    }
    return ", ".join(text.format(environment[name]) for name, text in words.items() if environment.get(name))


def write_picture(path: Path, runs: Sequence[tuple[str, PartTree]]) -> None:
    """Writes the page of `equivtest judge --picture`.  Raises BrokenSetup if the file cannot be written."""
    page = _rendered(PICTURE, runs=[(text, tree.rows()) for text, tree in runs])
    _write(path.parent, {path.name: page})


def _rendered(template: str, **values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("equivtest", "report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return templates.get_template(template).render(**values)


def cell_grid(tally: Tally) -> dict[str, Any]:
    """Returns {'kinds': shard kinds, 'rows': [(world size, dtype, cells)]}, with one cell for each shard kind.

    A cell is (number of conclusive verdicts, number of other verdicts), or None if no case can have that shard kind.
    """
    sizes = sorted({size for size, _, _ in tally.cells})
    dtypes = list(dict.fromkeys(dtype for _, dtype, _ in tally.cells))
    kinds = tally.kinds_of_cells(max(sizes, default=1))
    rows = []
    for size in sizes:
        possible = tally.kinds_of_cells(size)
        for dtype in dtypes:
            found = [_cell(tally, (size, dtype, kind)) if kind in possible else None for kind in kinds]
            rows.append((size, dtype, found))
    return {"kinds": kinds, "rows": rows}


def plotted(tally: Tally) -> list[tuple[Sequence[str], drawn.Histogram]]:
    """Returns (tensor's row in the table of margins without the columns of bins, histogram) for each tensor."""
    table = margins.merged([tally.margins])
    plain = (row[: margins.NUM_PLAIN] for row in margins.rows(table))
    return list(zip(plain, map(drawn.histogram_of, table.values()), strict=True))


def overview(tallies: Sequence[Tally]) -> tuple[list[str], list[tuple[str, list[tuple[int, int] | None]]]]:
    """Returns (dtypes, rows), with one row (property's name, entries) for each property.

    An entry counts (cells with a conclusion, cells) of one dtype.  It is None if the property has no cell of the dtype.
    """
    dtypes = list(dict.fromkeys(dtype for tally in tallies for _, dtype, _ in tally.cells))
    rows = []
    for tally in tallies:
        found: dict[str, tuple[int, int]] = {}
        for _, dtype, cells_of_row in cell_grid(tally)["rows"]:
            conclusive, number = found.get(dtype, (0, 0))
            possible = [cell for cell in cells_of_row if cell is not None]
            found[dtype] = conclusive + sum(cell[0] > 0 for cell in possible), number + len(possible)
        rows.append((tally.listed.name, [found.get(dtype) for dtype in dtypes]))
    return dtypes, rows


def _cell(tally: Tally, key: tuple[int, str, str]) -> tuple[int, int]:
    counts = tally.cells.get(key, Counter())
    conclusive = sum(counts[kind] for kind in CONCLUSIVE)
    return conclusive, sum(counts.values()) - conclusive


def unsupported_cells(tally: Tally) -> list[tuple[int, str, str, int, str]]:
    return [(*cell, count, reason) for (cell, reason, _), count in sorted(tally.lacking.items())]
