"""Cells: enough draws in every one, and more where too few conclude."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis.strategies import SearchStrategy

from equivtest.cases.case import Case
from equivtest.families.redistribute.strategy import redistribute_cases
from equivtest.families.training.data_parallel.strategy import data_parallel_cases
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.families.zero3.fetch.strategy import refused_fetch_cases
from equivtest.property import Property, Space
from equivtest.report.handover import Record
from equivtest.search.chunks import Chunk, chunk_cases
from equivtest.search.filling import (
    BATCH,
    PATIENCE,
    Cell,
    IsJudged,
    always,
    cells_of,
    draws_by_cell,
    fill,
    short_of_conclusions,
    short_of_draws,
)
from equivtest.verdicts.claims import (
    equals_unsharded,
    is_the_identity_for_one_rank,
    refuses,
    repeats_itself,
    uses_only_collectives,
)
from tests.engine.test_chunks import CHUNK, claimed
from tests.engine.test_report import record


def filled_cases(prop: Property, chunk: Chunk, is_judged: IsJudged = always) -> list[Case]:
    """A chunk's cases, and those that fill its cells."""
    cases = chunk_cases(prop, chunk)
    return cases + fill(prop, chunk, cases, short_of_draws(prop, chunk, cases, is_judged), is_judged)


def filled(prop: Property, per_cell: int = 9, **fields: Any) -> Counter[Cell]:
    """Draws by cell of a chunk of one case, and of those that fill its cells."""
    found = Counter[Cell]()
    for case in filled_cases(prop, replace(CHUNK, num_cases=1, per_cell=per_cell, **fields)):
        found += draws_by_cell(prop, case)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "prop",
    [
        claimed(claims=(equals_unsharded, repeats_itself)),
        claimed(cases=refused_fetch_cases, claims=(refuses,)),
        claimed(cases=lambda space: data_parallel_cases(space, style="ddp"), claims=(equals_unsharded,), shards=False),
        claimed(conclusive_dtypes=("float64",), claims=(equals_unsharded,)),
    ],
    ids=["fetches", "refusals", "without shards", "one dtype"],
)
def test_conformance_run_adds_cases_until_every_cell_has_the_required_draws(prop: Property, world_size: int) -> None:
    found = filled(prop, world_size=world_size)

    assert min(found[cell] for cell in cells_of(prop, replace(CHUNK, world_size=world_size))) >= 9


def test_conformance_run_requires_no_cell_of_a_dtype_that_the_property_skips() -> None:
    prop = replace(claimed(claims=(equals_unsharded,)), leaves_out=lambda space: dict.fromkeys(space.dtypes[:1], ""))

    cells = cells_of(prop, CHUNK)

    assert {dtype for dtype, _, _ in cells} == set(CHUNK.dtypes[1:])


def test_search_for_additional_cases_ends_although_no_case_can_judge_a_claim() -> None:
    found = filled(claimed(claims=(equals_unsharded, is_the_identity_for_one_rank)))

    assert {claim for _, _, claim in found} == {"equals_unsharded"}


def test_only_cases_that_add_draws_to_an_unfilled_cell_are_kept() -> None:
    cases = filled_cases(claimed(), replace(CHUNK, num_cases=1, per_cell=9))

    assert 3 * 4 < len(cases) < 9 * 3 * 4 and len(cases) == len(set(cases))


def is_small(case: Case, claim: str) -> bool:
    """True for all claims on fetches of few parameters, and for all claims but one on any fetch."""
    assert isinstance(case, FetchCase)
    return len(case.parameters) < 3 or claim != "equals_unsharded"


def test_cases_in_which_the_claim_is_known_to_fail_are_not_added() -> None:
    prop, chunk = claimed(), replace(CHUNK, num_cases=1, per_cell=9)
    found, of_all = Counter[Cell](), Counter[Cell]()
    for case in filled_cases(prop, chunk, is_small):
        found += draws_by_cell(prop, case, is_small)
        of_all += draws_by_cell(prop, case)

    assert min(found[cell] for cell in cells_of(prop, chunk)) >= 9
    assert found != of_all
    assert {cell[2] for cell in of_all if of_all[cell] > found[cell]} == {"equals_unsharded"}


def test_cell_is_filled_although_one_drawn_case_in_a_hundred_belongs_to_it() -> None:
    prop, chunk = claimed(claims=(equals_unsharded,)), replace(CHUNK, num_cases=1, per_cell=1)
    found = Counter[Cell]()

    def is_rare(case: Case, claim: str) -> bool:
        assert isinstance(case, FetchCase)
        return case.dtype != "float16" or case.values[0][1] < 2

    for case in filled_cases(prop, chunk, is_rare):
        found += draws_by_cell(prop, case, is_rare)

    assert min(found[cell] for cell in cells_of(prop, chunk)) >= 1


def test_added_cases_record_collectives_only_until_the_claim_on_collectives_has_enough() -> None:
    prop = claimed(cases=unmarked, claims=(equals_unsharded, uses_only_collectives))
    cases = filled_cases(prop, replace(CHUNK, world_size=4, num_cases=20, per_cell=9))
    recorded = [case for case in cases if case.records]
    draws = Counter(case.shard_kind for case in recorded for _ in case.values)
    most = max(len(case.values) for case in cases)

    assert all(9 <= draws[kind] < 9 + most for kind in ("even", "uneven", "empty"))
    assert not any(len(case.mesh_shape) > 1 for case in recorded)
    assert any(len(case.mesh_shape) > 1 for case in cases)


def unmarked(space: Space) -> SearchStrategy[Case]:
    """Redistributions, on one axis and two, none of them recorded."""
    return redistribute_cases(space).map(lambda case: replace(case, records=False))


def test_added_cases_record_no_collectives_if_the_claim_on_collectives_fails_as_known() -> None:
    def is_judged(case: Case, claim: str) -> bool:
        return not case.records

    prop = claimed(cases=unmarked, claims=(equals_unsharded, uses_only_collectives))
    cases = filled_cases(prop, replace(CHUNK, num_cases=1, per_cell=9), is_judged)

    assert len(cases) > 12 and not any(case.records for case in cases)


def test_search_for_additional_cases_ends_in_its_budget_if_a_cell_stays_unfilled() -> None:
    asked: list[Case] = []

    def is_never(case: Case, claim: str) -> bool:
        asked.append(case)
        return False

    cases = filled_cases(claimed(claims=(equals_unsharded,)), replace(CHUNK, per_cell=9), is_never)

    assert len(cases) <= CHUNK.num_cases
    assert PATIENCE * BATCH / 2 < len(asked) - len(cases) <= PATIENCE * BATCH


def test_conformance_run_requires_cells_only_of_the_shard_kinds_of_the_property() -> None:
    prop = claimed(conclusive_shards=("even", "uneven"))

    assert {kind for _, kind, _ in cells_of(prop, CHUNK)} == {"even", "uneven"}
    assert {kind for _, kind, _ in cells_of(claimed(), CHUNK)} == {"even", "uneven", "empty"}


def verdicts_of(kinds: dict[str, int], **fields: Any) -> list[Record]:
    place = {"dtype": "float16", "shard_kind": "empty"} | fields
    return [record(verdicts={"equals_unsharded": kind}, **place) for kind in Counter(kinds).elements()]


@pytest.mark.parametrize(
    ("kinds", "short"),
    [
        ({"holds": 9}, 0),
        ({"holds": 9, "inconclusive": 9}, 0),
        ({"holds": 9, "inconclusive": 10}, 1),
        ({"holds": 8, "value": 1, "inconclusive": 9}, 0),
        ({"holds": 7, "inconclusive": 1}, 2),
        ({"known": 9, "not_supported": 9}, 0),
        ({"holds": 1, "known": 30, "inconclusive": 10}, 9),
        ({"inconclusive": 39}, 9),
        ({"inconclusive": 40}, 0),
        ({"holds": 7}, 2),
    ],
)
def test_cell_lacks_conclusive_verdicts_below_its_minimum_or_its_inconclusive_ones(
    kinds: dict[str, int], short: int
) -> None:
    prop, chunk = claimed(claims=(equals_unsharded,)), replace(CHUNK, per_cell=9)
    wanted = {("float16", "empty", "equals_unsharded"): short} if short else {}

    assert dict(short_of_conclusions(prop, chunk, verdicts_of(kinds))) == wanted


def test_conclusions_on_real_values_do_not_outweigh_inconclusive_verdicts_on_integers() -> None:
    prop, chunk = claimed(claims=(equals_unsharded,)), replace(CHUNK, per_cell=9)
    records = verdicts_of({"holds": 9}, mode="real-cancelling")
    records += verdicts_of({"holds": 2, "inconclusive": 3}, mode="dense")

    assert dict(short_of_conclusions(prop, chunk, records)) == {("float16", "empty", "equals_unsharded"): 1}


def test_verdicts_of_another_dtype_or_shard_kind_do_not_fill_a_cell() -> None:
    records = verdicts_of({"holds": 99}, dtype="float32") + verdicts_of({"holds": 99}, shard_kind="even")

    found = short_of_conclusions(claimed(), replace(CHUNK, per_cell=30), records + verdicts_of({"inconclusive": 1}))

    assert found.total() == 30


def test_cases_added_for_an_unfilled_cell_are_new_and_fill_the_cell() -> None:
    prop, missing = claimed(claims=(equals_unsharded,)), Counter({("float16", "empty", "equals_unsharded"): 12})
    before = filled_cases(prop, replace(CHUNK, per_cell=9))
    further = fill(prop, replace(CHUNK, seed="round 1"), before, missing)

    assert sum(len(case.values) for case in further) >= 12
    assert {(case.dtype, case.shard_kind) for case in further} == {("float16", "empty")}
    assert not set(further) & set(before)
