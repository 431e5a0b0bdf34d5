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
    from equivtest.programs.checking import CheckFailed, Result, check
    from equivtest.programs.groups import Judge, Training, World
    from equivtest.programs.inputs import Input, ids, mask, positions, real, targets
    from equivtest.programs.program import module_property, program

_HOMES = {
    "capturing": ("capture", "capture_update"),
    "programs.groups": ("Judge", "Training", "World"),
    "programs.inputs": ("Input", "ids", "mask", "positions", "real", "targets"),
    "programs.checking": ("CheckFailed", "Result", "check"),
    "programs.program": ("module_property", "program"),
}
"""Modules -> what is public of them, imported when somebody first asks for it: most take torch."""

__all__ = [
    "CheckFailed", "Input", "Judge", "NotSupported", "Result", "Training", "World", "__version__",
    "capture", "capture_update", "check", "ids", "mask", "module_property", "positions", "program", "real", "targets",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
