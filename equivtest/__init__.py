"""Checks that a parallel computation is the unsharded one, and finds the smallest case where it is not."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from equivtest.errors import NotSupported

try:
    __version__ = version("equivtest")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"

if TYPE_CHECKING:
    from equivtest.capturing import capture, capture_update
    from equivtest.module import ids, mask, module_property, positions, real, targets

__all__ = [
    "NotSupported", "__version__", "capture", "capture_update", "ids", "mask", "module_property", "positions", "real",
    "targets",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """What describes or captures a module of your own, imported when it is asked for: it takes torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "equivtest.capturing" if name.startswith("capture") else "equivtest.module"
    return getattr(importlib.import_module(home), name)
