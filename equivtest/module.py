"""The former home of the functions for properties of programs.  New code imports them from `equivtest`."""

from __future__ import annotations

from equivtest.programs.inputs import Input, ids, mask, positions, real, targets
from equivtest.programs.program import module_property

__all__ = ["Input", "ids", "mask", "module_property", "positions", "real", "targets"]
