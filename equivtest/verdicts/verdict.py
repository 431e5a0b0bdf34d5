"""What was concluded about one claim on one draw of a case, and the exception that each kind of failure is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

from equivtest.base import limits
from equivtest.cases.case import Case
from equivtest.errors import EquivtestError


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
        way_out: What to do about it, where that is known.
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


@dataclass(frozen=True)
class Judgement:
    """What a claim makes of one draw.

    Attributes:
        kind: One of KINDS or of OTHER_KINDS.
        mismatches: Empty unless the claim fails on tensors.
        agreeing: Names of the tensors that the claim judged and found right.
        margin: Largest error / allowed over all elements; 0 where all are equal.
        margins: Tensor name -> its largest error / allowed, of those judged by a bound.
        parts: The same of what parts of a module held, in the order of the run; None where nothing is concluded.
        factors: Tensor name -> factor of the ranks' gradient beside the unsharded one, of those that agree, unless 1.
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
    """One claim, judged on one draw.

    Attributes:
        draw: Index into `case.values`.
        detail: For raised, lost and timed out: the first cause first, then every rank.
        known: The reason of the known failure that the case falls under.
        history: Where the claim holds of the case alone in new ranks: what had run before it failed.
        shrunk_from: The first failing case and its first wrong tensor, if that is another tensor than this verdict's.
        fault: Whose it is: 'collective: ...', 'kernel: ...' or 'parallelization: ...'; '' where nobody looked.
        limit_s: Seconds that a visit of the case may take.
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
        """The kind of its judgement."""
        return self.judgement.kind

    @property
    def first_tensor(self) -> str:
        """The name of the first wrong tensor; '' if the failure concerns none."""
        return next((mismatch.tensor for mismatch in self.judgement.mismatches), "")

    @property
    def failed(self) -> bool:
        """True if the claim was judged and does not hold."""
        return self.kind in KINDS and KINDS[self.kind].fails


KINDS: dict[str, type[ClaimFailed]] = {}
"""Kinds of verdict that `check` raises, by name; each is one subclass of `ClaimFailed`, which registers itself."""

OTHER_KINDS = ("holds", "inconclusive", "known", "declined")
"""Kinds that it does not raise; 'known' is a known failure, not judged again, 'declined' what the program says that it
does not support."""


class ClaimFailed(EquivtestError, AssertionError):
    """A claim does not hold; `verdict` says which, where and by how much.  Each subclass is one kind of failure.

    Attributes:
        kind: Its name in verdicts, records, replay files and known failures.
        headline: The first line of the message, behind the names of the class and the subject.
        fails: False if the claim was not judged at all.
        ends_run: True if the run itself ended so, which concerns every claim of the case.
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
    """An element differs from the oracle's by more than is allowed."""


class LayoutMismatch(ClaimFailed, kind="layout", headline="{tensor} has another layout than its contract"):
    """A tensor lives under other placements than its contract says."""


class ShapeMismatch(ClaimFailed, kind="shape", headline="{tensor} has another shape or dtype than the oracle's"):
    """A rank's local tensor has another shape or dtype than the oracle's slice."""


class ReplicaMismatch(ClaimFailed, kind="replica", headline="{tensor} differs between ranks that hold the same"):
    """Two ranks hold different bits of what should be one replicated value."""


class InputTouched(ClaimFailed, kind="touched", headline="{tensor} is not as it was handed out"):
    """The subject changed something that the harness owns."""


class BitsMismatch(ClaimFailed, kind="bits", headline="{tensor} has not the bits of the unsharded computation"):
    """A value that nothing should round has other bits than the oracle's."""


class RepeatMismatch(ClaimFailed, kind="repeat", headline="{tensor} is not the same when the case runs again"):
    """The same case, run again in the same processes, gave other bits."""


class ChanceMismatch(
    ClaimFailed,
    kind="chance",
    headline="{tensor}: too many or too few elements dropped, or the same on two ranks",
):
    """A random result, such as which elements dropout drops, is too unlikely."""


class CollectiveMismatch(ClaimFailed, kind="collectives", headline="other collectives than the documented ones"):
    """The kinds, counts or bytes of the collectives are not the documented ones."""


class NotRefused(ClaimFailed, kind="not_refused", headline="a case outside the contract was not refused alike"):
    """A case outside the contract was not refused alike on every rank."""


class RankRaised(ClaimFailed, kind="raised", headline="a rank raised", ends_run=True):
    """A rank raised; the verdict holds the first rank's traceback."""


class RankLost(ClaimFailed, kind="lost", headline="a rank's process ended", ends_run=True):
    """A rank's process ended before it answered."""


class RankTimedOut(ClaimFailed, kind="timed_out", headline="a rank did not answer", ends_run=True):
    """A rank did not answer within the limit; the verdict holds every rank's stacks."""


class BackendRefuses(
    ClaimFailed, kind="not_supported", headline="the backend cannot do what the case needs", fails=False
):
    """The backend or device cannot do what the case needs, as a probe has shown."""


FAILING = tuple(kind for kind, error in KINDS.items() if error.fails)
"""Kinds of verdict that say a claim does not hold."""

CONCLUSIVE = ("holds", *FAILING)
"""Kinds of verdict that say whether a claim holds."""

WHOLE_RUN = tuple(kind for kind, error in KINDS.items() if error.ends_run)
"""Kinds that concern the run, hence every claim of the case."""
