"""Determines the level of conformance of a run.  Only a complete run of the profile `conformance` reaches a level."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from equivtest.cases.names import SUBJECTS
from equivtest.report.tally import Tally

if TYPE_CHECKING:
    from equivtest.property import Property

PROGRAMS = "programs"
LEVELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("collectives", frozenset({"collectives", "differentiable"})),
    (
        "parallel layers and fetches",
        frozenset({"cross_entropy", "dropout", "embedding", "linear", "norm", "redistribute", "scale", "zero3"}),
    ),
    ("training", frozenset({"checkpoint", "training"})),
    ("programs and operators", frozenset({"operators", PROGRAMS})),
)
"""(name of the level, its families), from level 1.  A run reaches a level only with all levels below it."""


@dataclass(frozen=True)
class Level:
    """The results of a run on the properties of one level of conformance.

    Attributes:
        number: Number of the level, from 1.
        missing: Properties that were not judged to their end.
        failing: Keys (subject, claim) of claims that do not hold.
        open: Keys of claims without a conclusion, in the run or in a required cell.
    """

    number: int
    name: str
    missing: tuple[str, ...]
    failing: tuple[str, ...]
    open: tuple[str, ...]
    num_held: int
    num_known: int

    @property
    def is_complete(self) -> bool:
        return not (self.missing or self.failing or self.open) and self.num_held > 0

    def __str__(self) -> str:
        known = f", {self.num_known} known to fail" * bool(self.num_known)
        words = [
            f"{len(names)} {what}, first {names[0]}"
            for what, names in (("failing", self.failing), ("not judged", self.missing), ("open", self.open))
            if names
        ]
        if self.is_complete:
            words = [f"complete: {self.num_held} keys hold{known}"]
        return f"level {self.number}, {self.name}: {'; '.join(words) or 'nothing was judged'}"


def level_of(subject: str) -> int:
    names = SUBJECTS.get(subject, "").split(".")
    family = names[2] if names[:2] == ["equivtest", "families"] else PROGRAMS
    return next(number for number, (_, families) in enumerate(LEVELS, start=1) if family in families)


def levels_of(tallies: Iterable[Tally], required: Mapping[str, str], holes: Mapping[str, Sequence[str]]) -> list[Level]:
    """Returns the results of a run on each level.

    Args:
        required: Property -> its subject, for all properties that a complete run judges.
        holes: Property -> required cells without a conclusion.
    """
    judged = {tally.listed.name: tally for tally in tallies if tally.is_complete}
    return [
        _level(
            number,
            name,
            {each: judged.get(each) for each, subject in required.items() if level_of(subject) == number},
            holes,
        )
        for number, (name, _) in enumerate(LEVELS, start=1)
    ]


def _level(number: int, name: str, tallies: Mapping[str, Tally | None], holes: Mapping[str, Sequence[str]]) -> Level:
    keys = [
        (f"{tally.listed.subject}: {result.claim}", result.outcome)
        for tally in tallies.values()
        if tally is not None
        for result in tally.claims()
    ]
    by_outcome = {word: tuple(key for key, outcome in keys if outcome == word) for word in OUTCOMES}
    return Level(
        number,
        name,
        missing=tuple(each for each, tally in tallies.items() if tally is None),
        failing=by_outcome["failed"],
        open=(*by_outcome["skipped"], *(f"{each}: {hole}" for each in tallies for hole in holes.get(each, ()))),
        num_held=len(by_outcome["passed"]),
        num_known=len(by_outcome["xfailed"]),
    )


OUTCOMES = ("passed", "failed", "skipped", "xfailed")


def reached(levels: Iterable[Level]) -> int:
    """Returns the highest level that is complete together with all lower levels, or 0."""
    number = 0
    for level in levels:
        if not level.is_complete:
            break
        number = level.number
    return number


def in_lines(levels: Sequence[Level]) -> Iterator[str]:
    yield from map(str, levels)
    number = reached(levels)
    yield f"level {number} of {len(levels)} is reached" if number else "no level is reached"


def required_of(properties: Mapping[str, Property]) -> dict[str, str]:
    return {name: prop.subject for name, prop in properties.items() if not prop.requires}
