"""Provides what all benchmarks need: repeated measurements, and the cases on which they are made."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from equivtest.base import limits
from equivtest.cases.case import Case
from equivtest.errors import Misuse
from equivtest.property import Property
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.first_cause import first_cause
from equivtest.ranks.reply import Reply
from equivtest.search.chunks import Chunk, chunk_cases
from equivtest.search.known import SHIPPED, KnownFailures
from equivtest.verdicts.claims import refuses


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        samples = list(samples)
        return cls(statistics.median(samples), min(samples), max(samples), len(samples))

    def over(self, base: float) -> Spread:
        return Spread(self.median / base, self.low / base, self.high / base, self.count)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}..{self.high:.3f})"


class RankFailed(Exception):
    """Raised if a rank did not answer a case that it should have answered."""


def require_answers(subject: str, case: Case, replies: Sequence[Reply]) -> None:
    """Raises RankFailed, with the whole message of the rank that failed first, unless every rank has answered."""
    cause = first_cause(replies)
    if cause is not None:
        raise RankFailed(f"{subject} {case}: rank {cause.rank} {cause.outcome}: {cause.error_text}\n{cause.detail}")


def seconds_of(work: Callable[[], object]) -> float:
    begun_s = time.monotonic()
    work()
    return time.monotonic() - begun_s


def main_properties(subjects: Collection[str] = ()) -> list[Property]:
    """Returns the shipped properties about values of these subjects, or of all installed subjects."""
    found = [prop for prop in shipped().values() if refuses not in prop.claims and not prop.absent]
    known = dict.fromkeys(prop.subject for prop in found)
    for subject in subjects:
        if subject not in known:
            raise Misuse(
                f"--subjects: no property about values of {subject!r} that can run here; use some of {', '.join(known)}"
            )
    return [prop for prop in found if not subjects or prop.subject in subjects]


def draw_cases(prop: Property, world_size: int, num_cases: int) -> list[Case]:
    """Returns the first cases that the gate draws, except cases that torch is known not to survive.

    All cases run on all ranks and record no collectives, because the compared program supports neither groups nor
    records.
    """
    known = KnownFailures.load(SHIPPED)
    cases = chunk_cases(prop, Chunk(world_size, limits.DTYPES, 0, num_cases))
    cases = [replace(case, members=(), records=False) for case in cases]
    return [case for case in cases if not known.forbids_run(prop.subject, case)]
