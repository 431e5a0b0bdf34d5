"""The files of --report: for machines (JSON lines), for logs (text), for people (HTML)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from equivtest.errors import BrokenSetup
from equivtest.profiles import PROFILES
from equivtest.report import cells, margins
from equivtest.report.tally import CONCLUSIVE, Tally
from equivtest.report.text import summarize, totals

TEMPLATE = "report.html.jinja"
SUMMARY_WIDTH = 120  # columns of summary.txt


def write_report(
    directory: Path,
    environment: Mapping[str, Any],
    tallies: Sequence[Tally],
    lines: Iterable[str],
    known: Sequence[Mapping[str, Any]],
    headlines: Sequence[str] = (),
) -> None:
    """Writes everything but junit.xml, which is pytest's own.

    Args:
        headlines: What makes the run red besides failing claims.
        lines: Records, one JSON object each.
        known: Known failures, as their items reported them.

    Raises:
        BrokenSetup: a file cannot be written.
    """
    seconds = float(environment["seconds"])
    wants_cells = PROFILES[environment["profile"]].per_cell > 0
    summary = summarize(
        tallies, seconds=seconds, known=known, width=SUMMARY_WIDTH, wants_cells=wants_cells, headlines=headlines
    )
    texts = {
        "verdicts.jsonl": "".join(f"{line}\n" for line in lines),
        "summary.txt": "".join(f"{line}\n" for line in summary),
        "cells.csv": cells.as_csv(tallies),
        "environment.json": json.dumps(environment, indent=2) + "\n",
        "report.html": as_html(environment, tallies, known, headlines),
    }
    for name, text in texts.items():
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise BrokenSetup(f"cannot write {directory / name}: {error.strerror or error}") from error


def as_html(
    environment: Mapping[str, Any],
    tallies: Sequence[Tally],
    known: Sequence[Mapping[str, Any]],
    headlines: Sequence[str] = (),
) -> str:
    """One page that needs nothing else; every value is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("equivtest", "report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return templates.get_template(TEMPLATE).render(
        environment=environment,
        headlines=headlines,
        totals="; ".join(totals(tallies, float(environment["seconds"]))),
        unfinished="; ".join(unfinished(tallies)),
        properties=[
            {
                "tally": tally,
                "claims": [(result, tally.kinds.get(result.claim, {})) for result in tally.claims()],
                "grid": cell_grid(tally),
                "thinnest": cells.in_words(tally),
                "margins": margins.rows(margins.merged([tally.margins])),
            }
            for tally in tallies
        ],
        known=known,
        margins_head=margins.HEAD,
        unsupported=[(tally, *row) for tally in tallies for row in unsupported_cells(tally)],
    )


def unfinished(tallies: Iterable[Tally]) -> list[str]:
    """'3 of 4 searches of rowwise_linear ended' of every property that was interrupted."""
    return [
        f"{len(tally.done & set(tally.planned))} of {len(tally.planned)} searches of {tally.meta['name']} ended"
        for tally in tallies
        if not tally.is_complete
    ]


def cell_grid(tally: Tally) -> dict[str, Any]:
    """Conclusive and other verdicts by world size and dtype (down), shard kind (across)."""
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


def _cell(tally: Tally, key: tuple[int, str, str]) -> tuple[int, int]:
    counts = tally.cells.get(key, Counter())
    conclusive = sum(counts[kind] for kind in CONCLUSIVE)
    return conclusive, sum(counts.values()) - conclusive


def unsupported_cells(tally: Tally) -> list[tuple[int, str, str, int, str]]:
    """(world size, dtype, shard kind, verdicts, why) wherever the backend could not do what a case needs."""
    return [(*cell, count, reason) for (cell, reason, _), count in sorted(tally.lacking.items())]
