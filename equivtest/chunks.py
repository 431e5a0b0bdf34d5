"""Which cases a search runs: one chunk of a property's case space, drawn before anything runs.

Cases come from a seed of ours, so that a commit draws the same ones everywhere.  Where a profile asks for so many
draws in every cell of the case space, further cases are drawn and those kept that help a cell which is short of them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity

from equivtest.cases.base import Case
from equivtest.errors import Misuse
from equivtest.profiles import ANY, wanted_kinds
from equivtest.property import Property, Space
from equivtest.verdicts.claims import Claim

SETTINGS: dict[str, Any] = {
    "database": None,
    "deadline": None,
    "derandomize": False,
    "print_blob": False,
    "report_multiple_bugs": False,
    "suppress_health_check": list(HealthCheck),
    "verbosity": Verbosity.quiet,
}

BATCH = 50
"""Cases that are drawn at a time to fill cells."""
PATIENCE = 4
"""Batches in a row that may help no cell; some cells need what one case in a hundred is, others cannot be had."""

Cell = tuple[str, str, str]
"""(dtype, shard kind, claim); the dtype is '' for a claim that is not wanted in each."""


@dataclass(frozen=True)
class Chunk:
    """One part of a property's case space: one world size, so many cases, one seed.

    Attributes:
        seed: 'gate' for the fixed cases of this commit, anything else for others.
        per_cell: Draws that every claim is to get in each cell, by further cases.
    """

    world_size: int
    dtypes: tuple[str, ...]
    index: int
    num_cases: int
    seed: str = "gate"
    per_cell: int = 0

    @property
    def space(self) -> Space:
        """What the chunk's cases are drawn from."""
        return Space((self.world_size,), self.dtypes)


def seed_of(prop: Property, chunk: Chunk) -> int:
    """A chunk's seed: depends on nothing but the property, the chunk and its seed text."""
    claims = ",".join(claim.name for claim in prop.claims)
    text = f"{chunk.seed}|{prop.subject}|{claims}|{chunk.world_size}|{chunk.index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def always(case: Case, claim: str) -> bool:
    """Of every claim on every case."""
    return True


def chunk_cases(prop: Property, chunk: Chunk, is_judged: Callable[[Case, str], bool] = always) -> list[Case]:
    """The chunk's cases, each once: the property's examples (in chunk 0), drawn ones, and those that fill cells.

    Args:
        is_judged: Whether a case will be judged on the claim of that name, not known to fail; else it fills no cell.
    """
    examples = [case for case in prop.examples if chunk.index == 0 and case.world_size == chunk.world_size]
    cases = [case for case in examples if case.dtype in chunk.dtypes] + _draw(prop, chunk, chunk.num_cases)
    cases = list(dict.fromkeys(cases))
    return cases + list(_filling(prop, chunk, cases, is_judged)) if chunk.per_cell else cases


def _draw(prop: Property, chunk: Chunk, num_cases: int) -> list[Case]:
    cases = []

    @hypothesis.seed(seed_of(prop, chunk))
    @hypothesis.settings(max_examples=num_cases, phases=[Phase.generate], **SETTINGS)
    @hypothesis.given(prop.cases(chunk.space))
    def collect(case: Case) -> None:
        cases.append(case)

    collect()
    return cases


def _filling(
    prop: Property, chunk: Chunk, cases: Sequence[Case], is_judged: Callable[[Case, str], bool]
) -> Iterator[Case]:
    """Further cases, each of which has a claim judged in a cell that is short of draws."""
    missing = Counter(dict.fromkeys(cells_of(prop, chunk), chunk.per_cell))
    for case in cases:
        missing -= draws_by_cell(prop, case, is_judged)  # which keeps what is above zero alone
    seen, helpless, batch = set(cases), 0, 0
    while missing and helpless < PATIENCE:
        batch, helpless = batch + 1, helpless + 1
        short = replace(chunk, seed=f"{chunk.seed}, batch {batch}", dtypes=_dtypes_of(missing, chunk))
        for drawn in _draw(prop, short, BATCH):
            case = _flagged(prop, drawn, missing, is_judged)
            found = draws_by_cell(prop, case, is_judged)
            if case not in seen and missing.keys() & found.keys():
                helpless = 0
                seen.add(case)
                missing -= found
                yield case


def _flagged(prop: Property, case: Case, missing: Iterable[Cell], is_judged: Callable[[Case, str], bool]) -> Case:
    """The case; recorded, repeated or measured where a claim is judged then in a cell that is short of draws.

    Some claims are judged on one visit in eight, and some cells hold one case in a hundred: too few are both.
    """
    for claim in prop.claims:
        if claim.flag and not getattr(case, claim.flag) and _cell(prop, case, claim) in missing:
            mark: dict[str, Any] = {claim.flag: True}
            with contextlib.suppress(Misuse):  # collectives are documented of some cases alone
                flagged = replace(case, **mark)
                case = flagged if is_judged(flagged, claim.name) else case
    return case


def _dtypes_of(missing: Iterable[Cell], chunk: Chunk) -> tuple[str, ...]:
    """The chunk's dtypes in which some cell is short of draws; all where one is that has none."""
    short = {dtype for dtype, _, _ in missing}
    return tuple(dtype for dtype in chunk.dtypes if dtype in short or "" in short)


def cells_of(prop: Property, chunk: Chunk) -> set[Cell]:
    """Every cell in which the chunk may have cases, and a conformance run wants conclusions."""
    kinds = wanted_kinds(
        chunk.world_size, refusals=prop.refuses_only, shards=prop.shards, conclusive=prop.conclusive_shards
    )
    dtypes = [dtype for dtype in chunk.dtypes if dtype in (prop.conclusive_dtypes or chunk.dtypes)]
    return {
        (dtype if claim.by_dtype else "", kind, claim.name)
        for dtype in dtypes
        for kind in kinds
        for claim in prop.claims
    }


def draws_by_cell(prop: Property, case: Case, is_judged: Callable[[Case, str], bool] = always) -> Counter[Cell]:
    """How many draws of a case each claim is judged on, by its cell."""
    found = Counter[Cell]()
    for claim in prop.claims:
        judged = sum(claim.applies(case, draw) for draw in range(len(case.values)))
        if judged and is_judged(case, claim.name):
            found[_cell(prop, case, claim)] = judged
    return found


def _cell(prop: Property, case: Case, claim: Claim) -> Cell:
    return case.dtype if claim.by_dtype else "", ANY if prop.refuses_only else case.shard_kind, claim.name
