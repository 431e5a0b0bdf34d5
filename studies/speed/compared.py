"""Times two ways to compute the same thing in turn, in the same ranks: seconds, and ratios within each turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from equivtest.cases.case import Case
from equivtest.ranks.pool import Pool
from studies.speed.measure import Spread, require_answers
from studies.speed.rank_timing import FETCH_PARTS, FETCHES, ManyParameters

VISIT = "studies.speed.rank_timing:visit_timed"
WORLD_SIZES = (2, 4)
NUM_PARAMETERS = 200
NUMELS = {10: 20, 1_000: 20, 100_000: 5}
"""Number of elements of each fetched parameter -> how often that size is timed per requested repetition."""


@dataclass(frozen=True)
class Compared:
    """Times of two ways to compute one thing, for one part of the work.

    Attributes:
        setting: What is computed, as text.
        part: 'forward', 'submit', ...
        seconds: Way -> seconds of the slowest rank.
        ratio: Seconds of the second way divided by seconds of the first way, turn by turn.
    """

    setting: str
    world_size: int
    part: str
    seconds: dict[str, Spread]
    ratio: Spread


def measure_fetches(repeats: int) -> list[Compared]:
    """Times how 200 parameters are fetched at once by all_gather and by all_reduce, for several sizes."""
    found = []
    with Pool(max_worlds=1, visit=VISIT) as pool:
        for world_size in WORLD_SIZES:
            for numel, num_timed in NUMELS.items():
                case = ManyParameters(
                    world_size=world_size,
                    poison="none",
                    num_parameters=NUM_PARAMETERS,
                    numel=numel,
                    num_timed=num_timed,
                )
                times_s = _times(pool, "time_fetches", case, repeats)
                found += _compare(f"{numel:,} elements", world_size, FETCH_PARTS, tuple(FETCHES), times_s)
    return found


def _times(pool: Pool, function: str, case: Case, repeats: int) -> torch.Tensor:
    """Returns the seconds of the slowest rank, as a tensor of (times, ways, parts)."""
    found = []
    for _ in range(repeats):
        replies = pool.run(f"studies.speed.rank_timing:{function}", case)
        require_answers(function, case, replies)
        found.append(torch.stack([reply.answers[0].tensors["times"].local for reply in replies]).amax(0))
    return torch.cat(found)


def _compare(
    setting: str, world_size: int, parts: Sequence[str], ways: Sequence[str], times_s: torch.Tensor
) -> list[Compared]:
    compared = []
    for number, part in enumerate(parts):
        first_s, second_s = times_s[:, 0, number], times_s[:, 1, number]
        seconds = dict(zip(ways, (Spread.of(first_s.tolist()), Spread.of(second_s.tolist())), strict=True))
        compared.append(Compared(setting, world_size, part, seconds, Spread.of((second_s / first_s).tolist())))
    return compared
