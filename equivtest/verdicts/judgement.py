"""What a claim makes of one draw, and what it makes it from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from equivtest.ranks.reply import Answer
from equivtest.verdicts.verdict import Kind, Mismatch

Answers = Mapping[int, Answer]
"""rank -> its answer to one draw."""


@dataclass(frozen=True)
class Judgement:
    """What a claim makes of one draw; the fields are those of `Verdict`."""

    kind: Kind
    mismatches: tuple[Mismatch, ...] = ()
    agreeing: tuple[str, ...] = ()
    margin: float = 0.0
    margins: Mapping[str, float] = field(default_factory=dict)
