"""What does a case cost in worlds of up to 64 ranks, in time and in memory?

A machine of few cores can do no better than the work of that many single ranks, dealt out to
its cores: the time of a case is told beside that of the world of one, times ranks / cores.
What of the rest is the harness's is told by a bare loop: the same ranks run the same case time
after time, with no word to the parent in between.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass

import psutil

from equivtest.base import limits
from equivtest.cases.case import Case
from equivtest.families.linear.case import LinearCase
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.ranks.pool import Pool
from studies.speed.measure import Spread, require_answers, seconds_of
from studies.speed.throughput import VISIT, run_bare

WORLD_SIZES = tuple(2**power for power in range(limits.MAX_WORLD_SIZE.bit_length()))
NUM_STEADY = 10
MIB = 2**20


@dataclass(frozen=True)
class Scaled:
    """One case at one world size.

    Attributes:
        start_s: From nothing but a warm server to the first answer.
        steady_s: One case, once its shape is known.
        of_ideal: Steady, over the time of the world of one times ranks / cores (at least 1).
        of_bare: Steady, over the time of one case of a bare loop in the same world.
        unique_mib: USS of a rank, median over the ranks.
    """

    family: str
    world_size: int
    start_s: float
    steady_s: Spread
    of_ideal: Spread
    of_bare: Spread
    unique_mib: float


def cases_of(world_size: int) -> dict[str, tuple[str, Case]]:
    flags = ("x", "weight", "bias")
    linear = LinearCase(
        world_size=world_size, style="colwise", leading=(3,), in_features=4, out_features=64, bias=True,
        requires_grad=flags,
    )  # fmt: skip
    fetch = FetchCase(world_size=world_size, parameters=((64,), (3, 5)), requires_grad=(True, True))
    return {"linear": ("colwise_linear", linear), "fetch": ("zero3_fetch_all_gather", fetch)}


def measure_scale(repeats: int) -> list[Scaled]:
    """Both families at every world size, each in a fresh world."""
    found: list[Scaled] = []
    alone_s: dict[str, float] = {}
    with Pool(max_worlds=1, visit=VISIT) as pool:
        pool.run(*cases_of(1)["linear"])  # the server is warm
        for world_size in WORLD_SIZES:
            for family, (subject, case) in cases_of(world_size).items():
                pool.run(*cases_of(1 + world_size % 2)["linear"])  # ends the world there is: the pool holds one
                scaled = _measure(pool, family, subject, case, repeats, alone_s)
                found.append(scaled)
    return found


def _measure(pool: Pool, family: str, subject: str, case: Case, repeats: int, alone_s: dict[str, float]) -> Scaled:
    start_s = seconds_of(lambda: _run(pool, subject, case))
    times_s = [seconds_of(lambda: _run(pool, subject, case)) for _ in range(repeats * NUM_STEADY)]
    steady = Spread.of(times_s)
    alone_s.setdefault(family, steady.median)
    ideal_s = alone_s[family] * max(case.world_size / (os.cpu_count() or 1), 1)
    bare_s = _bare_s(pool, subject, case, len(times_s))
    ratios = (steady.over(ideal_s), steady.over(bare_s))
    return Scaled(family, case.world_size, start_s, steady, *ratios, _unique_mib(pool, case))


def _bare_s(pool: Pool, subject: str, case: Case, num_cases: int) -> float:
    """Seconds of one case in a loop of so many."""
    return seconds_of(lambda: run_bare(pool, subject, [case] * num_cases)) / num_cases


def _run(pool: Pool, subject: str, case: Case) -> None:
    require_answers(subject, case, pool.run(subject, case))


def _unique_mib(pool: Pool, case: Case) -> float:
    told = pool.run("studies.speed.programs:tell_pid", LinearCase(world_size=case.world_size, style="colwise"))
    pids = [int(reply.answers[0].tensors["output"].local) for reply in told]
    return statistics.median(float(psutil.Process(pid).memory_full_info().uss) for pid in pids) / MIB
