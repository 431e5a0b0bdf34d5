"""Reports the audits of a run as lines of the summary, as a table and as a CSV file.

An audit spoils collectives on purpose.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from equivtest.report.columns import aligned
from equivtest.report.handover import Audited

WAITS = "not audited: the audit waits until the property holds"
"""Text for a property that fails, since its audit would only repeat the failure."""

HEAD = ("property", "collective", "fault", "runs", "rejected", "by")


def in_lines(audits: Iterable[Audited]) -> list[str]:
    """Returns a line for each audit that waits, hangs, shows nothing or finds collectives that no claim checks."""
    lines = []
    for found in audits:
        if found.waits:
            lines.append(f"audit   {found.property}: {WAITS}")
        elif found.problem:
            lines.append(f"audit   {found.property}: shows nothing: {found.problem}")
        elif not found.cases:
            lines.append(
                f"audit   {found.property}: not audited: the property held in none of the cases on several ranks"
            )
        elif found.unseen:
            sites = ", ".join(found.unseen)
            lines.append(
                f"audit   {found.property}: every claim still held when these collectives ignored the other ranks: "
                f"{sites}"
            )
        if found.hung:
            lines.append(
                f"audit   {found.property}: ended early, because the program hung when {found.hung} was spoiled; a run "
                "would report this"
            )
    return lines


def rows_of(audits: Iterable[Audited]) -> Iterator[tuple[str, ...]]:
    """Yields a row for each collective and kind of planted fault, or one row with the reason why there is none."""
    for found in audits:
        for row in found.rows:
            by = ", ".join(f"{claim} {count}" for claim, count in Counter(row.by).most_common())
            where = (found.property, row.collective, row.fault)
            yield (*where, str(row.runs), str(row.rejected), by or "no claim")
        if not found.rows:
            words = found.reason or ("not audited" if not found.cases else "none was called")
            yield (found.property, "none", "", "", "", words)


def table(audits: Sequence[Audited]) -> list[str]:
    if not audits:
        return []
    rows = [HEAD, *rows_of(audits)]
    left = aligned([row[:-1] for row in rows])  # the last column is text
    seconds = sum(found.seconds for found in audits)
    num_cases = sum(found.cases for found in audits)
    totals = f"properties: {len(audits)}, cases: {num_cases}; {seconds:.0f} s of one process"
    return [*(f"{line}  {row[-1]}" for line, row in zip(left, rows, strict=True)), "", *in_lines(audits), totals]


def as_csv(audits: Iterable[Audited]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEAD)
    writer.writerows(rows_of(audits))
    return text.getvalue()
