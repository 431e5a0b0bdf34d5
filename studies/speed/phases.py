"""Measures how the time of one case divides into phases, from drawing the case to its verdicts.

One case runs at a time, nothing overlaps, and the rank that answers last counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection
from dataclasses import dataclass

from equivtest.base import limits
from equivtest.cases.case import Case
from equivtest.property import Property
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.search.chunks import Chunk, chunk_cases
from equivtest.verdicts.compare import compare
from equivtest.verdicts.judging import expected_of
from studies.speed.measure import draw_cases, main_properties, require_answers, seconds_of
from studies.speed.programs import PARTS

VISIT = "studies.speed.programs:timed_visit"
PHASES = ("draw", "send", *PARTS, "receive", "oracle", "compare")
"""Phases of a case, in order.

draw: Hypothesis draws the case. send: until the rank begins. hand out: the rank draws and slices the values. receive:
from the rank's last result until the parent has decoded the reply.
"""


@dataclass(frozen=True)
class Breakdown:
    """Median milliseconds of each phase, for cases of one family on one world size."""

    family: str  # of case: linear or fetch
    world_size: int
    num_cases: int
    median_ms: dict[str, float]


def measure_phases(num_cases: int, subjects: Collection[str]) -> list[Breakdown]:
    """Measures each family's cases on each world size.  Every case runs once, in new ranks."""
    samples: dict[tuple[str, int], list[dict[str, float]]] = {}
    with Pool(visit=VISIT) as pool:
        for prop in main_properties(subjects):
            for world_size in limits.WORLD_SIZES:
                draw_s = _draw_seconds(prop, world_size, num_cases)
                for case in draw_cases(prop, world_size, num_cases):
                    key = (type(case).__name__.removesuffix("Case").lower(), world_size)
                    times_s = {"draw": draw_s, **_measure_case(pool, prop, case)}
                    samples.setdefault(key, []).append(times_s)
    return [Breakdown(*key, len(found), _medians_ms(found)) for key, found in sorted(samples.items())]


def _draw_seconds(prop: Property, world_size: int, num_cases: int) -> float:
    chunk = Chunk(world_size, limits.DTYPES, 0, num_cases)
    return seconds_of(lambda: chunk_cases(prop, chunk)) / num_cases


def _measure_case(pool: Pool, prop: Property, case: Case) -> dict[str, float]:
    begun_s = time.monotonic()
    replies = pool.run(prop.subject, case)
    received_s = time.monotonic()
    require_answers(prop.subject, case, replies)
    last = max(replies, key=lambda reply: reply.at_s)
    times_s = {"send": last.at_s - last.busy_s - begun_s, **_parts(last), "receive": received_s - last.at_s}
    return {**times_s, **_judge(prop, case, replies)}


def _parts(reply: Reply) -> dict[str, float]:
    totals = sum(answer.tensors["times"].local for answer in reply.answers)
    return dict(zip(PARTS, totals.tolist(), strict=True))  # type: ignore[union-attr]


def _judge(prop: Property, case: Case, replies: list[Reply]) -> dict[str, float]:
    oracle_s = compare_s = 0.0
    for draw in range(len(case.values)):
        begun_s = time.monotonic()
        expected = expected_of(case, draw, replies)
        known_s = time.monotonic()
        compare(prop.subject, case, draw, expected, replies, prop.claims)
        oracle_s += known_s - begun_s
        compare_s += time.monotonic() - known_s
    return {"oracle": oracle_s, "compare": compare_s}


def _medians_ms(found: list[dict[str, float]]) -> dict[str, float]:
    return {phase: 1000 * statistics.median(times_s[phase] for times_s in found) for phase in PHASES}
