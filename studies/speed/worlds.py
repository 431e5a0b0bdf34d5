"""How fast is a world of 4 there, and there again after a rank is killed?

Everything is told as a multiple of the time that a cold world takes: one that multiprocessing
spawns, that imports torch, joins gloo and runs one case of the same subject.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass

from equivtest.families.linear.case import LinearCase
from equivtest.ranks.first_cause import first_cause
from equivtest.ranks.pool import Pool
from studies.speed.cold import run_cold_world
from studies.speed.measure import Spread, require_answers, seconds_of

WORLD_SIZE = 4
SUBJECT = "colwise_linear"
CASE = LinearCase(
    world_size=WORLD_SIZE, style="colwise", leading=(3,), in_features=4, out_features=8, bias=True,
    requires_grad=("x", "weight", "bias"),
)  # fmt: skip
EVICTION = LinearCase(world_size=1, style="colwise")  # of a pool of one world: running it ends the world of 4
VISIT = "studies.speed.programs:visit_one_or_list"
NUM_STEADY = 20
KILL_DELAY_S = 0.1  # until every rank is inside the subject


@dataclass(frozen=True)
class WorldTimes:
    """Seconds of the cold world, and multiples of their median for the rest.

    Attributes:
        started: From nothing but a warm server to the first case answered.
        steady: One case, once that shape is known.
        heard: From SIGKILL to every rank's reply, the grace for its peers included; by the rank killed.
        replaced: From then to the next case answered, by a new world.
        recovered: From the end of the process being noticed to the next case answered.
    """

    cold_s: Spread
    started: Spread
    steady: Spread
    heard: tuple[Spread, ...]
    replaced: tuple[Spread, ...]
    recovered: tuple[Spread, ...]


def measure_worlds(repeats: int) -> WorldTimes:
    cold_s, started_s, steady_s = [], [], []
    lost_s: list[list[tuple[float, ...]]] = [[] for _ in range(WORLD_SIZE)]
    with Pool(max_worlds=1, visit=VISIT) as pool:
        pool.run(SUBJECT, CASE)  # the server is warm, the dtype probed
        for _ in range(repeats):
            cold_s.append(run_cold_world(SUBJECT, CASE))
            pool.run("colwise_linear", EVICTION)
            started_s.append(seconds_of(lambda: _run(pool)))
            steady_s += [seconds_of(lambda: _run(pool)) for _ in range(NUM_STEADY)]
            for rank in range(WORLD_SIZE):
                lost_s[rank].append(_lose(pool, rank))
    cold = Spread.of(cold_s)
    heard, replaced, recovered = (
        tuple(Spread.of(times[place] for times in lost).over(cold.median) for lost in lost_s) for place in range(3)
    )
    started, steady = (Spread.of(times).over(cold.median) for times in (started_s, steady_s))
    return WorldTimes(cold, started, steady, heard, replaced, recovered)


def _run(pool: Pool) -> None:
    require_answers(SUBJECT, CASE, pool.run(SUBJECT, CASE))


def _lose(pool: Pool, rank: int) -> tuple[float, float, float]:
    """Kills a rank inside a case: seconds as of `heard`, `replaced` and `recovered`."""
    told = pool.run("studies.speed.programs:tell_pid", CASE)[rank]
    killed_s = []

    def kill() -> None:
        killed_s.append(time.monotonic())
        os.kill(int(told.answers[0].tensors["output"].local), signal.SIGKILL)

    timer = threading.Timer(KILL_DELAY_S, kill)
    timer.start()
    waiting = LinearCase(world_size=WORLD_SIZE, style="colwise", values=(("dense", rank),))
    replies = pool.run("studies.speed.programs:wait_for_victim", waiting)
    heard_s = time.monotonic()
    timer.join()
    cause = first_cause(replies)
    assert cause is not None and (cause.rank, cause.outcome) == (rank, "lost"), replies
    _run(pool)
    now_s = time.monotonic()
    return heard_s - killed_s[0], now_s - heard_s, now_s - cause.at_s
