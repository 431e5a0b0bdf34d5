"""Checks that a parallel computation equals the unsharded one, and finds the smallest case in which it does not."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from equivtest.capturing import capture, capture_update
    from equivtest.errors import BrokenSetup, EquivtestError, Inconclusive, Misuse, NotSupported, Unsupported
    from equivtest.layout import Flat, Layout, Partial, Replicate, Shard
    from equivtest.oracle.rounding import Arithmetic
    from equivtest.programs.checking import CheckFailed, Result, check
    from equivtest.programs.groups import Judge, Training, World
    from equivtest.programs.inputs import Input, ids, mask, positions, real, targets
    from equivtest.programs.program import module_property, program
    from equivtest.property import Property, Space
    from equivtest.ranks.backend import Backend
    from equivtest.tensors import Placed

_HOMES = {
    "capturing": ("capture", "capture_update"),
    "errors": ("BrokenSetup", "EquivtestError", "Inconclusive", "Misuse", "NotSupported", "Unsupported"),
    "layout": ("Flat", "Layout", "Partial", "Replicate", "Shard"),
    "oracle.rounding": ("Arithmetic",),
    "programs.checking": ("CheckFailed", "Result", "check"),
    "programs.groups": ("Judge", "Training", "World"),
    "programs.inputs": ("Input", "ids", "mask", "positions", "real", "targets"),
    "programs.program": ("module_property", "program"),
    "property": ("Property", "Space"),
    "ranks.backend": ("Backend",),
    "tensors": ("Placed",),
}
"""Module -> its public names.  The first use of a name imports its module, because most modules import torch."""

__all__ = [
    "Arithmetic", "Backend", "BrokenSetup", "CheckFailed", "EquivtestError", "Flat", "Inconclusive", "Input", "Judge",
    "Layout", "Misuse", "NotSupported", "Partial", "Placed", "Property", "Replicate", "Result", "Shard", "Space",
    "Training", "Unsupported", "World", "__version__", "capture", "capture_update", "check", "ids", "mask",
    "module_property", "positions", "program", "real", "targets",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # here, because each process imports this package

    try:
        return version("equivtest")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+source"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
