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
    from equivtest.programs.groups import Judge, Training, World
    from equivtest.programs.inputs import Input, ids, mask, positions, real, targets
    from equivtest.programs.program import program
    from equivtest.programs.property import module_property

_HOMES = {
    "capturing": ("capture", "capture_update"),
    "programs.groups": ("Judge", "Training", "World"),
    "programs.inputs": ("Input", "ids", "mask", "positions", "real", "targets"),
    "programs.program": ("program",),
    "programs.property": ("module_property",),
}
"""Modules -> what is public of them, imported when somebody first asks for it: most take torch."""

__all__ = [
    "Input", "Judge", "NotSupported", "Training", "World", "__version__", "capture", "capture_update", "ids", "mask",
    "module_property", "positions", "program", "real", "targets",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
