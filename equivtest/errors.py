"""The exceptions that this package raises on purpose, except claim failures (`equivtest.verdicts.verdict`).

A `ClaimFailed` gives exit code 1. Every exception of this module gives exit code 2.
"""

from __future__ import annotations

import re

VALUE_CHARS = 300

MISUSE_CHARS = 2_000

_VALUES = (r"\S", r"(?<=[ (=])'[^']", r'(?<=[ (=])"[^"]', r"\([^()]")
_LONG_VALUE = re.compile("|".join(f"{value}{{{VALUE_CHARS},}}" for value in _VALUES))
"""Pattern of a value that is too long: a text without spaces, or a text within quotes or parentheses."""


class EquivtestError(Exception):
    """Base class of all exceptions that this package raises on purpose, except claim failures."""


class Misuse(EquivtestError, ValueError):
    """Raised for a mistake of the caller.  The message names the value, the limit and the way out.

    The message shows at most VALUE_CHARS characters of each value.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shorten_values(message))


class PropertyMisuse(Misuse):
    """Raised for a mistake in a property itself.  Every case would show the mistake, so no other case is tried."""


class ReferenceRefuses(PropertyMisuse):
    """Raised if the reference, which defines the right result, does not support a case."""

    def __init__(self, who: str, error: NotSupported) -> None:
        super().__init__(
            f"{who} raised {type(error).__name__}: {error}: the unsharded module defines the right result, so it must "
            "support every drawn case. Leave out cases that it does not support, such as by inputs= or sizes=; if "
            "only the parallel module does not, raise NotSupported in parallelize, set_up, step or that module"
        )


class Inconclusive(EquivtestError, RuntimeError):
    """Raised if a run shows neither that a claim holds nor that it fails."""


class BrokenSetup(EquivtestError, RuntimeError):
    """Raised if ranks cannot run here, because a backend, a device or an import does not work."""


class HostLost(BrokenSetup):
    """Raised if a rank's host died or was cut off. The code that ran on that host is not to blame."""


class Unsupported(EquivtestError, RuntimeError):
    """Raised on every rank if this torch or this backend does not support what the case needs.

    Args:
        lacking: The collective that the backend refused, as 'dtype:function' or 'dtype:function_reduction'. It is '' if
            a release of torch lacks something.
    """

    def __init__(self, message: str, lacking: str = "") -> None:
        super().__init__(message)
        self.lacking = (lacking,) if lacking else ()


class NotSupported(EquivtestError, RuntimeError):
    """Raised by a program to say that it does not support a case.

    Examples are heads that the ranks cannot divide, and a dtype that the program refuses.

    `parallelize`, `set_up`, `step`, and the forward and backward of the parallel module may raise this exception or a
    subclass. If every rank raises it, the case is declined: the case is neither right nor wrong, and the summary counts
    it. If only some ranks raise the exception, the case fails, as with any other exception.  If a property's program
    declines all of its cases on several ranks, its claims are open and the run ends with exit code 2.  `build` and the
    unsharded module must not raise this exception.

    Args:
        reason: The reason why the program does not support the case, in one sentence, for the summary.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


def reason_of(error: OSError | ValueError) -> str:
    """Returns the reason why a path cannot be used.  A ValueError means that it contains an invalid character."""
    return getattr(error, "strerror", None) or str(error)


def shorten(text: str, num_chars: int = VALUE_CHARS) -> str:
    """Replaces the middle of a text that is longer than about `num_chars` characters by a note."""
    left_out = len(text) - num_chars
    if left_out <= 0:
        return text
    head = num_chars // 2
    return f"{text[:head]}[... {left_out} characters left out ...]{text[head - num_chars :]}"


def shorten_values(message: str) -> str:
    return shorten(_LONG_VALUE.sub(lambda value: shorten(value[0]), message), MISUSE_CHARS)
