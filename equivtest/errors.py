"""What this package raises on purpose, but for failures of claims: those are in `equivtest.verdicts.verdict`.

Exit codes: a `ClaimFailed` is 1, everything here is 2.
"""

from __future__ import annotations

import re

VALUE_CHARS = 300
"""Characters of one value of the user that a message shows."""

MISUSE_CHARS = 2_000
"""Characters of the whole message of a `Misuse`."""

_VALUES = (r"\S", r"(?<=[ (=])'[^']", r'(?<=[ (=])"[^"]', r"\([^()]")
_LONG_VALUE = re.compile("|".join(f"{value}{{{VALUE_CHARS},}}" for value in _VALUES))
"""A run without spaces, the inside of quotes or of parentheses, each if it is long."""


class EquivtestError(Exception):
    """Base of every exception this package raises on purpose."""


class Misuse(EquivtestError, ValueError):
    """The caller's mistake: the message names the value, the limit and the way out.

    The message shows at most VALUE_CHARS characters of each value.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shorten_values(message))


class PropertyMisuse(Misuse):
    """A mistake of the property itself, so that no other case is tried in place of the one that shows it."""


class ReferenceRefuses(PropertyMisuse):
    """What defines what is to be computed says that it does not support a case.

    Args:
        who: The function or module that said so.
    """

    def __init__(self, who: str, error: NotSupported) -> None:
        super().__init__(
            f"{who} raised {type(error).__name__}: {error}: the reference defines what is to be computed, and supports "
            "each case that is drawn: leave out what it does not take, such as by x_shapes= or sizes=, or raise it in "
            "parallelize, set_up, step or the parallel module"
        )


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


class NotSupported(EquivtestError, RuntimeError):
    """A program's own word that it does not support a case: heads that do not divide, a dtype that it refuses.

    `parallelize`, `set_up`, `step`, and the forward and backward of the parallel module may raise it, or a class of
    their own that derives from it.  On every rank it declines the case, which is then neither right nor wrong, and the
    summary counts it; on some ranks alone it is a failure like any other exception.  Where a property's program
    declines all of its cases on several ranks, its claims are open and the run ends with exit code 2.  Of `build`, and
    of the unsharded module, it is a mistake.

    Args:
        reason: Why, in one sentence, for the summary.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


def reason_of(error: OSError | ValueError) -> str:
    """Returns why a path cannot be used, without the path; ValueError: it holds a character that no path has."""
    return getattr(error, "strerror", None) or str(error)


def shorten(text: str, num_chars: int = VALUE_CHARS) -> str:
    """Leaves out the middle of a text that is longer than about `num_chars` characters."""
    left_out = len(text) - num_chars
    if left_out <= 0:
        return text
    head = num_chars // 2
    return f"{text[:head]}[... {left_out} characters left out ...]{text[head - num_chars :]}"


def shorten_values(message: str) -> str:
    """Shortens each long value within a message, and a message that is long as a whole."""
    return shorten(_LONG_VALUE.sub(lambda value: shorten(value[0]), message), MISUSE_CHARS)
