"""What this package raises on purpose, but for failures of claims: those are in `equivtest.verdicts.verdict`.

Exit codes: a `ClaimFailed` is 1, everything here is 2.
"""

from __future__ import annotations


class EquivtestError(Exception):
    """Base of every exception this package raises on purpose."""


class Misuse(EquivtestError, ValueError):
    """The caller's mistake: the message names the value, the limit and the way out."""


class Inconclusive(EquivtestError, RuntimeError):
    """A run that shows neither that a claim holds nor that it fails, which must not look like a pass."""


class BrokenSetup(EquivtestError, RuntimeError):
    """No rank can run here: a backend, a device or an import does not work."""


class HostLost(BrokenSetup):
    """A rank's host died or was cut off, which says nothing of what ran there."""


class Unsupported(EquivtestError, RuntimeError):
    """This torch or backend cannot do what the case needs; every rank finds so alike.

    Args:
        lacking: 'dtype:function' of the collective that the backend refused, a reduction's name behind it; '' where a
            release has not something.
    """

    def __init__(self, message: str, lacking: str = "") -> None:
        super().__init__(message)
        self.lacking = (lacking,) if lacking else ()
