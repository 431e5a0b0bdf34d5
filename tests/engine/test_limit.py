"""The time limit of a visit of a property's cases: wherever a case is visited, written down, and reported."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from equivtest.base import limits
from equivtest.cases.case import Case, from_code
from equivtest.errors import Misuse
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.families.zero3.fetch.strategy import fetch_cases
from equivtest.module import module_property
from equivtest.property import Property, resolved
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.search.audit import audit
from equivtest.search.chunks import Chunk
from equivtest.search.known import KnownFailures
from equivtest.search.replay import read_replay, replay
from equivtest.search.search import Findings, search
from equivtest.verdicts.claims import equals_unsharded
from equivtest.verdicts.judging import check
from tests.programs.search import SLOW_S
from tests.replies import StubPool, right_replies

CHUNK = Chunk(2, ("float32",), 0, 10)
PROGRAMS = "tests.programs.search:"


def claimed(limit_s: float, subject: str = "mine:fetch") -> Property:
    """A property of fetches; no module may hold one, or pytest would run it."""
    return Property(
        subject, "Fetched parameters are right.", "nowhere", fetch_cases, (equals_unsharded,), limit_s=limit_s
    )


def run(pool: Pool | StubPool, folder: Path, prop: Property, chunk: Chunk = CHUNK) -> Findings:
    return search(prop, chunk, cast(Pool, pool), KnownFailures(), folder)


def hangs(case: Case) -> list[Reply]:
    """Right replies of worlds that are no larger than one rank."""
    silent = [Reply(rank=0, outcome="timed_out")] if case.num_processes > 1 else []
    return [*silent, *right_replies(case)[len(silent) :]]


def test_search_and_its_diagnosing_run_use_the_time_limit_of_the_property(tmp_path: Path) -> None:
    pool = StubPool(lambda case: [replace(right_replies(case)[0], outcome="lost"), *right_replies(case)[1:]])
    run(pool, tmp_path, claimed(200.0))

    assert (pool.searched_s, set(pool.limits_s), pool.watched_s) == (200.0, {200.0}, 200.0)


@pytest.mark.parametrize(("limit_s", "tries_s"), [(1.0, {1.0}), (60.0, {5.0}), (240.0, {20.0, 240.0})])
def test_shrinking_a_time_out_uses_a_shorter_time_limit_than_the_final_run(
    tmp_path: Path, limit_s: float, tries_s: set[float]
) -> None:
    pool = StubPool(hangs)
    [failure] = run(pool, tmp_path, claimed(limit_s), replace(CHUNK, world_size=3)).failures

    assert failure.kind == "timed_out" and set(pool.limits_s) == tries_s
    assert pool.watched_s == max(tries_s)


def test_shrinking_a_time_out_reports_no_case_that_ends_within_the_full_limit(tmp_path: Path) -> None:
    pool = StubPool()

    def is_large(case: Case) -> bool:
        return isinstance(case, FetchCase) and math.prod(case.parameters[0]) > 3

    def answer(case: Case) -> list[Reply]:
        has_all_its_time = not pool.limits_s or pool.limits_s[-1] == 240.0
        return hangs(case) if is_large(case) or not has_all_its_time else right_replies(case)

    pool.answer = answer
    [failure] = run(pool, tmp_path, claimed(240.0)).failures

    assert from_code(failure.case) == next(case for case in pool.seen if is_large(case))
    assert any(not is_large(case) for case in pool.seen[CHUNK.num_cases :])


def test_message_and_replay_file_of_a_time_out_have_the_time_limit(tmp_path: Path) -> None:
    [failure] = run(StubPool(hangs), tmp_path, claimed(240.0)).failures
    data = read_replay(Path(failure.replay))
    again = StubPool(hangs)

    assert (
        "limit     one run of a case may take 240 s: raise this limit with limit_s of its property, or"
        in failure.message
    )
    assert data["limit_s"] == 240.0
    assert replay(data, cast(Pool, again))[0] and again.limits_s == [240.0]


@pytest.mark.parametrize("limit_s", [0, -1.0, 300.5, math.inf, math.nan, True, "60", pytest.param(10**400, id="huge")])
def test_limit_above_half_of_the_backends_time_out_is_refused(limit_s: Any) -> None:
    with pytest.raises(Misuse, match=r"limit_s must be seconds, above 0 and at most 300, got .*time-out of 600 s"):
        module_property("a:b", "a:c", [(2, 3)], limit_s=limit_s)
    assert module_property("a:b", "a:c", [(2, 3)], limit_s=300).limit_s == 300


@pytest.mark.parametrize("limit_s", [math.nan, 1e9])
def test_invalid_time_limit_of_a_single_case_is_refused_before_ranks_start(limit_s: float) -> None:
    """No rank is ever asked, who would be waited for."""
    case = FetchCase(world_size=2, parameters=((1,),))
    with pytest.raises(Misuse, match="limit_s must be seconds"):
        check("mine:fetch", case, cast(Pool, StubPool(hangs)), limit_s=limit_s)


@pytest.mark.ranks
@pytest.mark.parametrize(("limit_s", "kinds"), [(SLOW_S / 4, {"timed_out"}), (20 * SLOW_S, {"holds"})])
def test_ranks_run_with_the_time_limit_of_the_property(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float, kinds: set[str]
) -> None:
    monkeypatch.setattr(limits, "BROKEN_RUNS", 1)
    monkeypatch.setattr(limits, "SHRINK_S", 0.0)
    found = run(pool, tmp_path, claimed(limit_s, PROGRAMS + "slow"), replace(CHUNK, num_cases=1))

    assert {kind for record in found.records for kind in record.verdicts.values()} == kinds


@pytest.mark.ranks
def test_probing_a_program_uses_the_time_limit_of_its_property(pool: Pool) -> None:
    here = "tests.programs.batch:"
    prop = module_property(here + "mlp", here + "hangs", [(2, 3)], limit_s=1.0)

    with pytest.raises(Misuse, match="did not answer: no answer within 1 s"):
        resolved(prop, pool)


@pytest.mark.ranks
def test_case_run_with_a_planted_fault_has_a_longer_time_limit(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a slow program would time out with each fault, and no claim see any."""
    monkeypatch.setattr(limits, "AUDIT_CASE_S", SLOW_S / 4)
    monkeypatch.setattr(limits, "AUDIT_CASES", 1)
    prop = replace(shipped()["zero3_fetch_all_gather"], subject=PROGRAMS + "slow")
    found = audit(prop, pool, KnownFailures(), (2,), ("float32",))

    assert (found.problem, found.unseen) == ("", []) and found.rows
