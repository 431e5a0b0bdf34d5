"""Shrinking what costs a world, or a time limit, per try: bounded by limits.SHRINK_S and by counts, on any machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import equivtest.search.search
from equivtest.base import limits
from equivtest.cases.case import Case, from_code
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.families.zero3.fetch.strategy import fetch_cases
from equivtest.property import Property
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Outcome, Reply
from equivtest.ranks.world import World
from equivtest.search.chunks import Chunk
from equivtest.search.known import KnownFailures
from equivtest.search.search import Findings, search
from equivtest.verdicts.claims import equals_unsharded
from tests.replies import StubPool, right_replies

CHUNK = Chunk(2, limits.DTYPES, 0, 20)


def run(pool: Pool | StubPool, tmp_path: Path, subject: str = "mine:fetch", limit_s: float = limits.CASE_S) -> Findings:
    claims = (equals_unsharded,)
    prop = Property(subject, "Fetched parameters are right.", "nowhere", fetch_cases, claims, limit_s=limit_s)
    return search(prop, CHUNK, cast(Pool, pool), KnownFailures(), tmp_path)


class Clock:
    """Stands for time.monotonic; a run of a case moves it on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(equivtest.search.search, "time", SimpleNamespace(monotonic=lambda: self.now_s))


def failing_pool(clock: Clock, outcome: Outcome, cost_s: float) -> StubPool:
    """Returns a pool in which rank 0 fails in every case, on any world size, after `cost_s`."""

    def answer(case: Case) -> list[Reply]:
        clock.now_s += cost_s
        return [Reply(rank=0, outcome=outcome), *right_replies(case)[1:]]

    return StubPool(answer)


@pytest.mark.parametrize(
    ("outcome", "cost_s"), [("timed_out", limits.SHRINK_CASE_S), ("lost", limits.GRACE_S), ("lost", limits.CASE_S)]
)
def test_shrinking_begins_no_case_after_the_end_of_its_time_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Outcome, cost_s: float
) -> None:
    clock = Clock(monkeypatch)
    pool = failing_pool(clock, outcome, cost_s)
    [failure] = run(pool, tmp_path).failures

    assert failure.kind == outcome
    assert len(pool.limits_s) <= limits.SHRINK_S / cost_s + 1
    assert clock.now_s <= limits.BROKEN_RUNS * cost_s + limits.SHRINK_S + 2 * cost_s  # it is watched once more


def test_each_failure_has_a_separate_time_budget_for_shrinking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def answer(case: Case) -> list[Reply]:
        assert isinstance(case, FetchCase)
        clock.now_s += limits.SHRINK_CASE_S
        return [Reply(rank=0, outcome="lost" if len(case.parameters) > 1 else "timed_out"), *right_replies(case)[1:]]

    pool = StubPool(answer)
    failures = {failure.kind: failure for failure in run(pool, tmp_path).failures}

    assert failures.keys() == {"lost", "timed_out"}
    assert clock.now_s - limits.BROKEN_RUNS * limits.SHRINK_CASE_S > limits.SHRINK_S
    assert clock.now_s <= limits.BROKEN_RUNS * limits.SHRINK_CASE_S + 2 * (limits.SHRINK_S + limits.SHRINK_CASE_S)


@pytest.fixture
def counted(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Pool, list[int], list[list[Reply]]]]:
    """A pool, the sizes of the worlds it starts, and the replies it gives while a failure is shrunk."""
    worlds: list[int] = []
    replies: list[list[Reply]] = []
    start, ask = World.__init__, Pool.run

    def count_world(self: World, world_size: int, *args: object, **kwargs: object) -> None:
        worlds.append(world_size)
        start(self, world_size, *args, **kwargs)  # type: ignore[arg-type]

    def count_run(self: Pool, *args: object, **kwargs: object) -> list[Reply]:
        replies.append(ask(self, *args, **kwargs))  # type: ignore[arg-type]
        return replies[-1]

    monkeypatch.setattr(World, "__init__", count_world)
    monkeypatch.setattr(Pool, "run", count_run)
    with Pool(beside=pool) as counting:
        yield counting, worlds, replies


@pytest.mark.ranks
def test_shrinking_the_death_of_a_rank_starts_one_world_for_each_death(
    counted: tuple[Pool, list[int], list[list[Reply]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, worlds, tries = counted
    monkeypatch.setattr(limits, "SHRINK_S", 600.0)
    findings = run(pool, tmp_path, "tests.programs.search:dies_of_three")

    [failure] = findings.failures
    smallest = from_code(failure.case)
    assert isinstance(smallest, FetchCase)
    deaths = sum(any(reply.outcome == "lost" for reply in replies) for replies in tries)
    assert failure.kind == "lost" and smallest.world_size == 2 and smallest.parameters == ((3,),)
    assert 0 < deaths <= len(tries)
    assert len(worlds) <= len(set(worlds)) + limits.BROKEN_RUNS + deaths + 2


@pytest.mark.ranks
def test_shrinking_a_hang_ends_within_its_time_budget(
    counted: tuple[Pool, list[int], list[list[Reply]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, _, tries = counted
    for name, value in {"BROKEN_RUNS": 1, "SHRINK_CASE_S": 0.5, "SHRINK_S": 2.0}.items():
        monkeypatch.setattr(limits, name, value)
    findings = run(pool, tmp_path, "tests.programs.search:hangs_of_three", limit_s=2.0)

    hanging = [replies for replies in tries if any(reply.outcome == "timed_out" for reply in replies)]
    [failure] = findings.failures
    assert failure.kind == "timed_out"
    assert re.search(r"no answer within 0\.5 s, the limit while .* the limit was 2 s", failure.message)
    assert len(hanging) <= limits.SHRINK_S / limits.SHRINK_CASE_S + 1
