"""Lists one result for each claim of each property of a run. All formats are made from this list."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from equivtest.report.handover import Failure, Listed
from equivtest.report.log import Run


@dataclass(frozen=True)
class Result:
    """The result of one claim of one property.

    Attributes:
        text: Full messages of the claim's failures, or the reason why there is no conclusion.
    """

    listed: Listed
    claim: str
    outcome: Literal["passed", "failed", "skipped", "xfailed"]
    text: str
    failures: tuple[Failure, ...]

    @property
    def name(self) -> str:
        return f"{self.listed.name}::{self.claim}"

    @property
    def line(self) -> int | None:
        return None if self.listed.line is None else self.listed.line + 1


def results_in(run: Run, outcomes: Collection[str] = ()) -> list[Result]:
    """Returns the results in order of property and claim."""
    return [
        Result(
            tally.listed,
            claim.claim,
            claim.outcome,
            claim.text,
            tuple(failure for failure in tally.failures if failure.claim == claim.claim),
        )
        for tally in run.results.ordered()
        for claim in tally.claims()
        if not outcomes or claim.outcome in outcomes
    ]


def cut_bytes(text: str, size_bytes: int) -> str:
    return text.encode()[:size_bytes].decode(errors="ignore")
