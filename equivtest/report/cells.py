"""Counts the verdicts on each claim in each cell, which is a combination of world size, dtype and shard kind."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from equivtest.base.profiles import MAX_INCONCLUSIVE, PER_CELL
from equivtest.report.tally import Tally
from equivtest.verdicts.verdict import CONCLUSIVE

OTHERS = ("inconclusive", "known", "not_supported", "declined")

HEAD = ("property", "claim", "world size", "dtype", "shards", "conclusive", *OTHERS)


@dataclass(frozen=True)
class ClaimCell:
    """Counts the verdicts of each kind on one claim in one cell.

    Attributes:
        dtype: Name of the dtype. It is 'any', for all dtypes, if the claim does not need verdicts in each dtype.
    """

    property_name: str
    claim: str
    world_size: int
    dtype: str
    shard_kind: str
    counts: Counter[str]

    @property
    def conclusive(self) -> int:
        return sum(self.counts[kind] for kind in CONCLUSIVE)

    @property
    def is_open(self) -> bool:
        """True if the share of inconclusive verdicts exceeds what a conformance run allows."""
        open_ones = self.counts["inconclusive"]
        return open_ones > MAX_INCONCLUSIVE * (self.conclusive + open_ones)

    @property
    def row(self) -> tuple[str | int, ...]:
        where = (self.property_name, self.claim, self.world_size, self.dtype, self.shard_kind)
        return (*where, self.conclusive, *(self.counts[kind] for kind in OTHERS))


def cells_of(tally: Tally) -> list[ClaimCell]:
    """Returns a `ClaimCell` for each claim and required cell, except world sizes on which the claim has no verdict."""
    counts = Counter[tuple[str, int, str, str, str]]()
    for ((size, dtype, kind), claim, _), verdicts in tally.claim_cells.items():
        for verdict, number in verdicts.items():
            counts[claim, size, _dtype(tally, claim, dtype), kind, verdict] += number
    judged = {(claim, size) for claim, size, *_ in counts}
    verdict_kinds = {key[-1] for key in counts}
    wanted = [
        (claim, size, _dtype(tally, claim, dtype), kind)
        for size, dtype, kind in tally.required_cells(dict.fromkeys(dtype for _, dtype, _ in tally.cells))
        for claim in tally.listed.claims
        if (claim, size) in judged
    ]
    return [
        ClaimCell(tally.listed.name, *cell, Counter({verdict: counts[(*cell, verdict)] for verdict in verdict_kinds}))
        for cell in dict.fromkeys(wanted)
    ]


def _dtype(tally: Tally, claim: str, dtype: str) -> str:
    return "any" if claim in tally.listed.of_any_dtype else dtype


def as_csv(tallies: Iterable[Tally]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEAD)
    writer.writerows(cell.row for tally in tallies for cell in cells_of(tally))
    return text.getvalue()


def in_words(tally: Tally) -> str:
    """Returns a line on the cells that need more conclusive verdicts and on the cell with the fewest, or ''."""
    cells = cells_of(tally)
    if not cells:
        return ""
    short, still_open = sum(cell.conclusive < PER_CELL for cell in cells), sum(cell.is_open for cell in cells)
    thin = min(cells, key=lambda cell: cell.conclusive)
    return (
        f"{tally.listed.name}: {short} of {len(cells):,} cells have fewer than {PER_CELL} conclusive verdicts, "
        f"{still_open} are more than {MAX_INCONCLUSIVE:.0%} inconclusive; fewest: {thin.conclusive} in "
        f"{thin.claim}, w{thin.world_size}, {thin.dtype}, {thin.shard_kind}"
    )
