"""Measures how many cases per second the harness judges, beside a bare loop over the same rank programs.

In the bare loop the ranks have the whole list of cases and run the cases one after the other: values handed out,
subject, answers collected, and no parent in between.  Each measurement starts in a fresh world, so that DTensor's
caches are cold in both, and the two take turns at going first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import typer

from equivtest.base import limits
from equivtest.cases.case import Case
from equivtest.property import Property
from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import judge_replies
from studies.speed.measure import RankFailed, Spread, draw_cases, main_properties, require_answers, seconds_of
from studies.speed.programs import CaseList

VISIT = "studies.speed.programs:visit_one_or_list"
TARGET = 0.85
LIMIT_S = 300.0  # of one bare loop
TRIES = 3  # of one measurement


@dataclass(frozen=True)
class Pair:
    """Seconds of each repetition for one subject on one world size, of the harness and of the bare loop."""

    subject: str
    world_size: int
    num_cases: int
    harness_s: tuple[float, ...]
    bare_s: tuple[float, ...]

    @property
    def ratio(self) -> Spread:
        return Spread.of(bare / harness for harness, bare in zip(self.harness_s, self.bare_s, strict=True))

    @property
    def rate(self) -> Spread:
        return Spread.of(self.num_cases / seconds for seconds in self.harness_s)


def measure_throughput(repeats: int, num_cases: int, subjects: Collection[str]) -> list[Pair]:
    with Pool(max_worlds=1, visit=VISIT) as pool:
        return [
            _measure_pair(pool, prop, world_size, repeats, num_cases)
            for world_size in limits.WORLD_SIZES
            for prop in main_properties(subjects)
        ]


def overall(pairs: Sequence[Pair]) -> Spread:
    """Returns, by repetition, all seconds of the bare loop divided by all seconds of the harness."""
    harness_s = [sum(times) for times in zip(*(pair.harness_s for pair in pairs), strict=True)]
    bare_s = [sum(times) for times in zip(*(pair.bare_s for pair in pairs), strict=True)]
    return Spread.of(bare / harness for harness, bare in zip(harness_s, bare_s, strict=True))


def _measure_pair(pool: Pool, prop: Property, world_size: int, repeats: int, num_cases: int) -> Pair:
    cases = draw_cases(prop, world_size, num_cases)
    ways: list[Callable[[], None]] = [
        lambda: run_harness(pool, prop, cases),
        lambda: run_bare(pool, prop.subject, cases),
    ]
    times_s: list[list[float]] = [[], []]
    for repeat in range(repeats):
        for way in (0, 1) if repeat % 2 == 0 else (1, 0):
            times_s[way].append(_seconds_in_fresh_world(pool, world_size, ways[way]))
    return Pair(prop.subject, world_size, len(cases), tuple(times_s[0]), tuple(times_s[1]))


def _seconds_in_fresh_world(pool: Pool, world_size: int, way: Callable[[], None]) -> float:
    """Measures the seconds of `way`.  If a rank failed, prints the failure and measures again."""
    for _ in range(TRIES):
        start_fresh_world(pool, world_size)
        try:
            return seconds_of(way)
        except RankFailed as failure:
            typer.echo(f"measured again, since a rank failed: {failure}", err=True)
    raise RankFailed(f"a rank failed in {TRIES} tries")


def start_fresh_world(pool: Pool, world_size: int) -> None:
    """Ends the ranks of this world size and starts new ranks, which probe every dtype that was not probed yet."""
    pool.renew(world_size)
    for dtype in limits.DTYPES:
        pool.run("", CaseList(world_size=world_size, dtype=dtype))


def run_harness(pool: Pool, prop: Property, cases: Sequence[Case]) -> None:
    for case, replies in pool.run_all(prop.subject, cases):
        require_answers(prop.subject, case, replies)
        judge_replies(prop.subject, case, replies, prop.claims)


def run_bare(pool: Pool, subject: str, cases: Sequence[Case]) -> None:
    """Makes the ranks run all cases, of one world size, one after the other, without the harness in between."""
    everything = CaseList.of(cases[0].world_size, cases)
    require_answers(subject, everything, pool.run(subject, everything, limit_s=LIMIT_S))
