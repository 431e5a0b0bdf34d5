"""Adds cases to a search whose own cases give too few conclusions in a cell (dtype, shard kind, claim).

Before anything runs, further cases are drawn, and a case is kept if it helps a cell that lacks draws.  After the
judgement, more cases are drawn for cells with too few conclusive verdicts.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from equivtest.base.profiles import ANY, wanted_kinds
from equivtest.cases.case import Case
from equivtest.errors import Misuse
from equivtest.property import Property
from equivtest.report.handover import Record
from equivtest.report.tally import family_of
from equivtest.search.chunks import Chunk, draw_cases
from equivtest.verdicts.claims import Claim
from equivtest.verdicts.verdict import CONCLUSIVE

BATCH = 50
"""Number of cases that are drawn at a time."""
PATIENCE = 4
"""Largest number of successive batches that help no cell.  Some cells occur in one case in a hundred, others never."""

ENOUGH = 40
"""Number of verdicts on a claim in a cell after which no further case is drawn for them."""

Cell = tuple[str, str, str]
"""(dtype, shard kind, claim).  The dtype is '' for a claim that does not need conclusions in every dtype."""

IsJudged = Callable[[Case, str], bool]
"""Tells if a claim will be judged on a case.  A case that is known to fail fills no cell."""


def always(case: Case, claim: str) -> bool:
    return True


def fill(
    prop: Property, chunk: Chunk, cases: Collection[Case], missing: Counter[Cell], is_judged: IsJudged = always
) -> list[Case]:
    """Draws further cases, and returns the cases that help a cell that lacks draws.

    Args:
        cases: Cases that the search already has.
        missing: Number of draws that each cell lacks.
    """
    seen, helpless, batch = set(cases), 0, 0
    found: list[Case] = []
    while missing and helpless < PATIENCE:
        batch, helpless = batch + 1, helpless + 1
        short = replace(chunk, seed=f"{chunk.seed}, batch {batch}", dtypes=_dtypes_of(missing, chunk))
        for drawn in draw_cases(prop, short, BATCH):
            case = _flagged(prop, drawn, missing, is_judged)
            draws = draws_by_cell(prop, case, is_judged) if case.is_within(chunk.dtypes) else Counter[Cell]()
            if case not in seen and missing.keys() & draws.keys():
                helpless = 0
                seen.add(case)
                missing = missing - draws  # keeps only counts above zero
                found.append(case)
    return found


def short_of_draws(prop: Property, chunk: Chunk, cases: Iterable[Case], is_judged: IsJudged = always) -> Counter[Cell]:
    """Returns the number of draws that each required cell lacks, if each cell needs the chunk's `per_cell` draws."""
    missing = Counter(dict.fromkeys(cells_of(prop, chunk), chunk.per_cell))
    for case in cases:
        missing -= draws_by_cell(prop, case, is_judged)
    return missing


def short_of_conclusions(prop: Property, chunk: Chunk, records: Iterable[Record]) -> Counter[Cell]:
    """Returns the number of further draws, at most `per_cell`, that each required cell needs if each is conclusive.

    A cell needs `per_cell` conclusive verdicts, and on each family of values at least as many conclusive as
    inconclusive verdicts.  A cell needs no draw if the claim finds nothing to judge in it, or if it already has ENOUGH
    verdicts.
    """
    conclusive, total = Counter[Cell](), Counter[Cell]()
    surplus: defaultdict[Cell, Counter[str]] = defaultdict(Counter)
    for record in records:
        for claim in prop.claims:
            verdict = record.verdicts.get(claim.name)
            is_conclusive = verdict in CONCLUSIVE
            if is_conclusive or verdict == "inconclusive":
                cell = _cell(prop, record.dtype, record.shard_kind, claim)
                conclusive[cell] += is_conclusive
                total[cell] += 1
                surplus[cell][family_of(record.mode)] += 1 if is_conclusive else -1
    missing = Counter[Cell]()
    for cell in cells_of(prop, chunk) & total.keys():
        if total[cell] < ENOUGH:
            wanted = max(chunk.per_cell - conclusive[cell], -min(surplus[cell].values()))
            missing[cell] = min(wanted, chunk.per_cell)
    return +missing


def _flagged(prop: Property, case: Case, missing: Iterable[Cell], is_judged: Callable[[Case, str], bool]) -> Case:
    """Returns the case with the flags (`records`, `repeats`, `measures`) of claims that lack draws in the case's cells.

    Some claims are judged only on the one case in eight that has their flag.  A rare cell would almost never get such a
    case by chance.
    """
    for claim in prop.claims:
        if claim.flag and not getattr(case, claim.flag) and _cell(prop, case.dtype, case.shard_kind, claim) in missing:
            mark: dict[str, Any] = {claim.flag: True}
            with contextlib.suppress(Misuse):  # only some cases have documented collectives
                flagged = replace(case, **mark)
                case = flagged if is_judged(flagged, claim.name) else case
    return case


def _dtypes_of(missing: Iterable[Cell], chunk: Chunk) -> tuple[str, ...]:
    """Returns the chunk's dtypes in which some cell lacks draws, or all if a cell without a dtype lacks draws."""
    short = {dtype for dtype, _, _ in missing}
    return tuple(dtype for dtype in chunk.dtypes if dtype in short or "" in short)


def cells_of(prop: Property, chunk: Chunk) -> set[Cell]:
    kinds = wanted_kinds(
        chunk.world_size, refusals=prop.refuses_only, shards=prop.shards, conclusive=prop.conclusive_shards
    )
    wanted, left_out = prop.conclusive_dtypes or chunk.dtypes, prop.left_out(chunk.space)
    dtypes = [dtype for dtype in chunk.dtypes if dtype in wanted and dtype not in left_out]
    return {
        (dtype if claim.by_dtype else "", kind, claim.name)
        for dtype in dtypes
        for kind in kinds
        for claim in prop.claims
    }


def draws_by_cell(prop: Property, case: Case, is_judged: Callable[[Case, str], bool] = always) -> Counter[Cell]:
    """Returns for each cell the number of the case's draws that are judged on the cell's claim."""
    found = Counter[Cell]()
    for claim in prop.claims:
        judged = sum(claim.applies(case, draw) for draw in range(len(case.values)))
        if judged and is_judged(case, claim.name):
            found[_cell(prop, case.dtype, case.shard_kind, claim)] = judged
    return found


def _cell(prop: Property, dtype: str, shard_kind: str, claim: Claim) -> Cell:
    return dtype if claim.by_dtype else "", ANY if prop.refuses_only else shard_kind, claim.name
