"""One exception class per kind of failure.

Hypothesis tells two bugs apart by exception type, file and line; `equivtest.check` therefore
raises each class below from a line of its own.  Exit codes: a `ClaimFailed` is 1, everything
else here is 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equivtest.verdicts.verdict import Verdict


class EquivtestError(Exception):
    """Base of every exception this package raises on purpose."""


class Misuse(EquivtestError, ValueError):
    """The caller's mistake: the message names the value, the limit and the way out."""


class BrokenSetup(EquivtestError, RuntimeError):
    """No rank can run here: a backend, a device or an import does not work."""


class Unsupported(EquivtestError, RuntimeError):
    """This torch or backend cannot do what the case needs; every rank finds so alike.

    Args:
        lacking: 'dtype:function' of the collective that the backend refused, a reduction's name behind it; '' where a
            release has not something.
    """

    def __init__(self, message: str, lacking: str = "") -> None:
        super().__init__(message)
        self.lacking = (lacking,) if lacking else ()


class ClaimFailed(EquivtestError, AssertionError):
    """A claim does not hold; `verdict` says which, where and by how much."""

    def __init__(self, verdict: Verdict, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict


class ValueMismatch(ClaimFailed):
    """An element differs from the oracle's by more than is allowed."""


class LayoutMismatch(ClaimFailed):
    """A tensor lives under other placements than its contract says."""


class ShapeMismatch(ClaimFailed):
    """A rank's local tensor has another shape or dtype than the oracle's slice."""


class ReplicaMismatch(ClaimFailed):
    """Two ranks hold different bits of what should be one replicated value."""


class InputTouched(ClaimFailed):
    """The subject changed something that the harness owns."""


class BitsMismatch(ClaimFailed):
    """A value that nothing should round has other bits than the oracle's."""


class RepeatMismatch(ClaimFailed):
    """The same case, run again in the same processes, gave other bits."""


class WaysMismatch(ClaimFailed):
    """Two ways of computing one thing gave different values."""


class ChanceMismatch(ClaimFailed):
    """What hangs on chance came out as chance does not have it."""


class CollectiveMismatch(ClaimFailed):
    """The kinds, counts or bytes of the collectives are not the documented ones."""


class NotRefused(ClaimFailed):
    """A case outside the contract was not refused alike on every rank."""


class RankRaised(ClaimFailed):
    """A rank raised; the verdict holds the first rank's traceback."""


class RankLost(ClaimFailed):
    """A rank's process ended before it answered."""


class RankTimedOut(ClaimFailed):
    """A rank did not answer within the limit; the verdict holds every rank's stacks."""


class NotSupported(ClaimFailed):
    """The backend or device cannot do what the case needs, as a probe has shown."""
