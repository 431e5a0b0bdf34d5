"""Makes Hypothesis draw without constants of imported modules, so that cases do not depend on other imports.

Hypothesis mixes integers, floats, bytes and strings that it finds in local modules into its draws, including indices of
tables with more than a hundred entries. Local modules are all modules outside of the standard library and
site-packages.  Hypothesis has no setting that prevents this.  Source: HypothesisProvider._maybe_draw_constant,
Hypothesis 6.131.1 to 6.170.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import hypothesis

SINCE = (6, 131, 1)
"""The first release of Hypothesis that draws such constants."""
HOME = "hypothesis.internal.conjecture.providers"
FINDER, CACHE = "_get_local_constants", "CONSTANTS_CACHE"
"""Names of Hypothesis' function that finds the constants of imported modules, and of its cache of constants."""
CACHE_SIZE = 1024  # as Hypothesis' own


class _NoConstants:
    """An empty replacement for Hypothesis' table of constants by type.

    Hypothesis looks up a type with a method since release 6.131.9, and with a key in earlier releases.
    """

    def set_for_type(self, choice_type: object) -> tuple[()]:
        return ()

    __getitem__ = set_for_type


@contextlib.contextmanager
def no_local_constants() -> Iterator[None]:
    """Makes Hypothesis' draws independent of imported modules while the context lasts."""
    if hypothesis.__version_info__ < SINCE:
        yield
        return
    home: dict[str, Any] = vars(importlib.import_module(HOME))
    if not {FINDER, CACHE} <= home.keys():
        warnings.warn(
            f"Hypothesis {hypothesis.__version__} has no {HOME}.{FINDER}: its draws may depend on what else is "
            "imported, so that other machines may draw other cases; install a newer equivtest",
            stacklevel=2,
        )
        yield
        return
    before = {name: home[name] for name in (FINDER, CACHE)}
    home.update({FINDER: _NoConstants, CACHE: type(before[CACHE])(CACHE_SIZE)})
    try:
        yield
    finally:
        home.update(before)
