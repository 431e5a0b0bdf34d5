"""What was concluded about one claim on one draw of a case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from equivtest.kit.case import Case

Kind = Literal[
    "holds",
    "value",
    "layout",
    "shape",
    "replica",
    "touched",
    "bits",
    "repeat",
    "ways",
    "chance",
    "collectives",
    "not_refused",
    "raised",
    "lost",
    "timed_out",
    "not_supported",
    "inconclusive",
    "known",
]
"""Kinds from 'value' to 'timed_out' are failures; 'known' is a known failure, not judged again."""

FAILURES: tuple[Kind, ...] = (
    "value", "layout", "shape", "replica", "touched", "bits", "repeat", "ways", "chance", "collectives", "not_refused",
    "raised", "lost", "timed_out",
)  # fmt: skip


@dataclass(frozen=True)
class Mismatch:
    """One tensor that is not as it should be; the fields that do not apply stay empty.

    Attributes:
        tensor: Its name, such as 'grad.weight'.
        rank: The rank whose element is shown (the largest error over its allowance).
        local_index, global_index: Of that element; padding has no global index.
        layout: Under which the rank holds it.
        expected, actual: The element's value, or the layout, shape, dtype, bits or flag.
        error, allowed: Absolute; allowed is 0 where equality is asked for.
        derivation: Why that much is allowed.
        extent: How many local elements are wrong, and on which ranks.
        pattern: What all wrong elements have in common, only where it is certain.
        process: Number in its world of the process that is the rank.
    """

    tensor: str
    rank: int
    expected: str
    actual: str
    local_index: tuple[int, ...] | None = None
    global_index: tuple[int, ...] | None = None
    global_shape: tuple[int, ...] | None = None
    layout: str = ""
    error: float = 0.0
    allowed: float = 0.0
    derivation: str = ""
    extent: str = ""
    pattern: str = ""
    process: int | None = None


@dataclass(frozen=True)
class Verdict:
    """One claim, judged on one draw.

    Attributes:
        draw: Index into `case.values`.
        mismatches: Empty unless the claim fails on tensors.
        agreeing: Names of the tensors that this claim judged and found right.
        margin: Largest error / allowed over all elements; 0 where all are equal.
        detail: For raised, lost and timed out: the first cause first, then every rank.
        known: The reason of the known failure that the case falls under.
        margins: Tensor name -> its largest error / allowed, of those judged by a bound.
        history: Where the claim holds of the case alone in new ranks: what had run before it failed.
    """

    kind: Kind
    claim: str
    subject: str
    case: Case
    draw: int = 0
    mismatches: tuple[Mismatch, ...] = ()
    agreeing: tuple[str, ...] = ()
    margin: float = 0.0
    detail: str = ""
    known: str = ""
    margins: Mapping[str, float] = field(default_factory=dict)
    history: str = ""

    @property
    def failed(self) -> bool:
        """Whether the claim was judged and does not hold."""
        return self.kind in FAILURES
