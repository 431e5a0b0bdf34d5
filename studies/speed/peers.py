"""How many verdicts per second, beside torch's own bases for tests on several processes?

The same cases: the same layouts and values, forward, backward and comparison.  Two countings.
A draw: all that one draw of values of one case is judged by, in one go; the same thing on both
sides, since a test method of the peer judges one draw.  A claim: of the harness each claim on
each draw (its verdicts), of the peer each tensor on each draw (its assertions).  Time counts
from the end of the first test or case to the end of the last, so that processes are up, where
they are kept; the harness judges in the parent, which its ranks do not wait for.  Beside them two bare
loops over the same visits.  In one every rank judges what it holds, as the peers' do: what the same work
takes where nobody manages it.  In the other nothing is judged: what a harness that makes these visits one
after the other can reach at most, so that its rate over a peer's bounds the ratio there is to gain.
"""

from __future__ import annotations

import time
import unittest
from collections.abc import Sequence
from dataclasses import dataclass, replace

from equivtest.cases.case import Case
from equivtest.oracle import expect
from equivtest.property import Property
from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import judge_replies
from studies.speed.measure import RankFailed, Spread, draw_cases, main_properties, require_answers, seconds_of
from studies.speed.throughput import VISIT, run_bare

SUBJECT = "colwise_linear"
WORLD_SIZES = (2, 4)
NUM_PROCESS_TESTS = 10  # measured of those that start processes anew; the rate is that of any number
HARNESS = "equivtest"
LOOPS = {"bare loop, judged in the ranks": True, "bare loop, nothing judged": False}
PEERS = {
    "ProcessTest": "MultiProcessTestCase, a draw per test",
    "ContinuousTest": "MultiProcContinuousTest, a draw per test",
    "BatchedTest": "MultiProcContinuousTest, a case per test",
}


@dataclass(frozen=True)
class Rate:
    """One way to judge at one world size, over the repetitions.

    Attributes:
        ratio_draws, ratio_claims: The harness's rate over this one's, repetition by repetition.
    """

    way: str
    world_size: int
    draws_per_s: Spread
    claims_per_s: Spread
    ratio_draws: Spread
    ratio_claims: Spread


def measure_peers(repeats: int, num_cases: int) -> list[Rate]:
    """Every way at every world size, all in turn."""
    [prop] = main_properties([SUBJECT])
    return [rate for world_size in WORLD_SIZES for rate in _measure_world(prop, world_size, repeats, num_cases)]


def _measure_world(prop: Property, world_size: int, repeats: int, num_cases: int) -> list[Rate]:
    cases = draw_cases(prop, world_size, max(num_cases, 2))
    cases = [replace(case, repeats=False, poison="none") for case in cases]  # no peer does either
    samples: dict[str, list[tuple[float, float]]] = {way: [] for way in (HARNESS, *LOOPS, *PEERS)}
    for _ in range(repeats):
        samples[HARNESS].append(_run_harness(prop, cases))
        for way, judged in LOOPS.items():
            samples[way].append(_run_bare(prop, cases, judged=judged))
        for way in PEERS:
            samples[way].append(_run_peer(way, cases))
    return [_rate(way, world_size, found, samples[HARNESS]) for way, found in samples.items()]


def _rate(way: str, world_size: int, found: Sequence[tuple[float, float]], ours: Sequence[tuple[float, float]]) -> Rate:
    rates = [Spread.of(sample[place] for sample in found) for place in (0, 1)]
    ratios = [Spread.of(a[place] / b[place] for a, b in zip(ours, found, strict=True)) for place in (0, 1)]
    return Rate(PEERS.get(way, way), world_size, *rates, *ratios)


def _run_harness(prop: Property, cases: Sequence[Case]) -> tuple[float, float]:
    """(draws, claims) judged per second, after the first case."""
    num_draws = num_claims = 0
    begun_s = 0.0
    with Pool() as pool:
        for case, replies in pool.run_all(prop.subject, cases):
            require_answers(prop.subject, case, replies)
            if not begun_s:  # the ranks have begun the second case
                begun_s = time.monotonic()
                continue
            verdicts = judge_replies(prop.subject, case, replies, prop.claims)
            num_draws += len(case.values)
            num_claims += len(verdicts)
        seconds = time.monotonic() - begun_s
    return num_draws / seconds, num_claims / seconds


def _run_bare(prop: Property, cases: Sequence[Case], *, judged: bool) -> tuple[float, float]:
    """(draws, tensors) computed per second, after the first case; with `judged` judged too."""
    work = _work_of("", cases)[len(cases[0].values) :]
    with Pool(visit=VISIT) as pool:
        require_answers(prop.subject, cases[0], pool.run(prop.subject, cases[0]))
        seconds = seconds_of(lambda: run_bare(pool, prop.subject, cases[1:], judged=judged))
    return len(work) / seconds, sum(tensors for _, tensors in work) / seconds


class _Stopwatch(unittest.TestResult):
    """Notes when each test has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended_s: list[float] = []

    def stopTest(self, test: unittest.TestCase) -> None:
        self.ended_s.append(time.monotonic())
        super().stopTest(test)


def _run_peer(way: str, cases: Sequence[Case]) -> tuple[float, float]:
    """(draws, tensors) judged per second by one of the peers, after its first test."""
    from studies.speed import peer_tests  # heavy, and needs expecttest, which the extra 'bench' brings

    found = getattr(peer_tests.with_cases(SUBJECT, cases), way)
    tests = list(unittest.defaultTestLoader.loadTestsFromTestCase(found))
    work = _work_of(way, cases)
    if way == "ProcessTest":
        tests, work = tests[: NUM_PROCESS_TESTS + 1], work[: NUM_PROCESS_TESTS + 1]
    result = _Stopwatch()
    unittest.TestSuite(tests).run(result)
    if not result.wasSuccessful() or result.skipped or len(result.ended_s) != len(work):
        raise RankFailed(f"{way}: {result.errors}{result.failures}{result.skipped}")
    seconds = result.ended_s[-1] - result.ended_s[0]
    return sum(draws for draws, _ in work[1:]) / seconds, sum(tensors for _, tensors in work[1:]) / seconds


def _work_of(way: str, cases: Sequence[Case]) -> list[tuple[int, int]]:
    """(draws, tensors) of each test, in order."""
    each = [[len(expect(case, draw).tensors) for draw in range(len(case.values))] for case in cases]
    if way == "BatchedTest":
        return [(len(tensors), sum(tensors)) for tensors in each]
    return [(1, count) for tensors in each for count in tensors]
