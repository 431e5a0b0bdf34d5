"""Offers functions for properties of programs under the name that older code imports, `equivtest.module`.

New code imports them from `equivtest`.
"""

from __future__ import annotations

from equivtest.programs.inputs import Input, ids, mask, positions, real, targets
from equivtest.programs.program import module_property

__all__ = ["Input", "ids", "mask", "module_property", "positions", "real", "targets"]
