"""The verdict on one claim for one draw of a case, and the exception class of each kind of failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

from equivtest.base import limits
from equivtest.cases.case import Case
from equivtest.errors import EquivtestError
from equivtest.verdicts.drawing import Drawing


@dataclass(frozen=True)
class Mismatch:
    """Describes one wrong tensor. Fields that do not apply stay empty.

    Attributes:
        tensor: Name of the tensor, such as 'grad.weight'.
        rank: The rank that has the shown element. This element has the largest error in relation to its allowed error.
        local_index, global_index: Indices of the shown element. Padding has no global index.
        expected, actual: The element's value, or the layout, shape, dtype, bits or flag.
        error, allowed: The element's absolute error, and its allowed error. The allowed error is 0 if values must be
            equal.
        extent: Number of wrong local elements, and the ranks that hold these elements, in words.
        pattern: A pattern that all wrong elements have in common, if there is no doubt about it.
        process: Number of the rank's process in the world.
        way_out: How to mend the mismatch, if the remedy is known.
        drawing: Wrong and right elements of all ranks, if the tensor is small and values are wrong.
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
    way_out: str = ""
    drawing: Drawing | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Judgement:
    """The judgement of a claim on one draw.

    Attributes:
        kind: One of KINDS or of OTHER_KINDS.
        mismatches: Empty unless the claim fails on tensors.
        agreeing: Names of the tensors that the claim judged to be right.
        margin: Largest quotient error / allowed of all elements; 0 if no element has an error.
        margins: For each tensor that was judged by a bound, its name and its largest quotient error / allowed.
        parts: For each input, output and gradient of a submodule, in the order of the run, its name and its largest
            quotient error / allowed. The quotient is None if nothing was concluded about the tensor.
        factors: For each gradient in `agreeing`, its name and the quotient of the ranks' gradient and the unsharded
            gradient. Gradients for which the quotient is 1 are left out.
    """

    kind: str
    mismatches: tuple[Mismatch, ...] = ()
    agreeing: tuple[str, ...] = ()
    _: KW_ONLY
    margin: float = 0.0
    margins: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, float | None] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.kind in KINDS or self.kind in OTHER_KINDS, self.kind


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one claim for one draw.

    Attributes:
        draw: Index into `case.values`.
        detail: For the kinds raised, lost and timed out, the first cause in full, and then one line for each other
            rank.
        known: The reason that the entry in the list of known failures gives, if an entry covers the case.
        history: The cases that had run before the case failed, if the claim holds when the case runs alone in new
            ranks.
        shrunk_from: The first failing case and its first wrong tensor, if shrinking led to another first wrong tensor.
        fault: The cause: 'collective: ...', 'kernel: ...', 'operator: ...' or 'parallelization: ...'; '' if the cause
            was not diagnosed.
        limit_s: Number of seconds that a visit of the case may take.
    """

    claim: str
    subject: str
    case: Case
    judgement: Judgement
    draw: int = 0
    detail: str = ""
    known: str = ""
    history: str = ""
    shrunk_from: str = ""
    fault: str = ""
    limit_s: float = limits.CASE_S

    @property
    def kind(self) -> str:
        return self.judgement.kind

    @property
    def first_tensor(self) -> str:
        return next((mismatch.tensor for mismatch in self.judgement.mismatches), "")

    @property
    def failed(self) -> bool:
        """True if the claim was judged and does not hold."""
        return self.kind in KINDS and KINDS[self.kind].fails


KINDS: dict[str, type[ClaimFailed]] = {}
"""Kinds of verdict that `check` raises, by name; each subclass of `ClaimFailed` registers its kind."""

OTHER_KINDS = ("holds", "inconclusive", "known", "declined")
"""Kinds that `check` does not raise.  'known' is a known failure, not judged again; 'declined' a case that the program
does not support."""


class ClaimFailed(EquivtestError, AssertionError):
    """A claim does not hold; `verdict` names the claim, the place and the error.  Each subclass is one kind of failure.

    Attributes:
        kind: Name of the kind in verdicts, records, replay files and known failures.
        headline: The first line of the message, after the names of the class and the subject.
        fails: False if this kind means that the claim was not judged at all.
        ends_run: True if the failure ended the run, so that it concerns every claim of the case.
    """

    kind: ClassVar[str]
    headline: ClassVar[str]
    fails: ClassVar[bool]
    ends_run: ClassVar[bool]

    def __init_subclass__(cls, *, kind: str, headline: str, fails: bool = True, ends_run: bool = False) -> None:
        super().__init_subclass__()
        cls.kind, cls.headline, cls.fails, cls.ends_run = kind, headline, fails, ends_run
        KINDS[kind] = cls

    def __init__(self, verdict: Verdict, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict


class ValueMismatch(ClaimFailed, kind="value", headline="{tensor} differs from the oracle"):
    """An element differs from the oracle's element by more than the allowed error."""


class LayoutMismatch(ClaimFailed, kind="layout", headline="{tensor} has another layout than its contract"):
    """A tensor has other placements than its contract states."""


class ShapeMismatch(ClaimFailed, kind="shape", headline="{tensor} has another shape or dtype than the oracle's"):
    """A rank's local tensor has another shape or dtype than the oracle's slice."""


class ReplicaMismatch(ClaimFailed, kind="replica", headline="{tensor} differs between ranks that hold replicas"):
    """Two ranks hold different bits of one replicated value."""


class InputTouched(
    ClaimFailed, kind="touched", headline="{tensor} has other values or another requires_grad than before"
):
    """The subject changed a tensor that the harness passed to it."""


class BitsMismatch(ClaimFailed, kind="bits", headline="{tensor} has other bits than the unsharded computation"):
    """A value that is computed without rounding has other bits than the oracle's value."""


class RepeatMismatch(ClaimFailed, kind="repeat", headline="{tensor} differs when the case runs again"):
    """The same case gave other bits when it ran again in the same processes."""


class ChanceMismatch(
    ClaimFailed,
    kind="chance",
    headline="{tensor}: too many or too few elements dropped, or the same on two ranks",
):
    """A random result, such as which elements dropout drops, is too unlikely."""


class CollectiveMismatch(ClaimFailed, kind="collectives", headline="other collectives than the documented ones"):
    """The recorded collectives differ from the documented collectives in kind, count or bytes."""


class NotRefused(ClaimFailed, kind="not_refused", headline="a case outside the contract was not refused alike"):
    """At least one rank did not refuse a case outside the contract, or the ranks refused it in different ways."""


class RankRaised(ClaimFailed, kind="raised", headline="a rank raised", ends_run=True):
    """A rank raised an exception. The verdict has the traceback of the first such rank."""


class RankLost(ClaimFailed, kind="lost", headline="a rank's process ended", ends_run=True):
    """A rank's process ended before the rank sent its reply."""


class RankTimedOut(ClaimFailed, kind="timed_out", headline="a rank did not answer", ends_run=True):
    """A rank sent no reply within the limit. The verdict has every rank's stacks."""


class BackendRefuses(
    ClaimFailed, kind="not_supported", headline="the backend cannot do what the case needs", fails=False
):
    """The backend or device cannot run the case, as a probe has shown."""


FAILING = tuple(kind for kind, error in KINDS.items() if error.fails)
"""The kinds of verdict on a claim that does not hold."""

CONCLUSIVE = ("holds", *FAILING)
"""Kinds of verdict that decide if a claim holds."""

WHOLE_RUN = tuple(kind for kind, error in KINDS.items() if error.ends_run)
"""Kinds that concern the whole run, hence every claim of the case."""
