"""Predicates on fetch cases, for the conditions `where` in known_failures.toml."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equivtest.families.zero3.fetch.case import FetchCase


def smallest_numel(case: FetchCase) -> int:
    return min(math.prod(shape) for shape in case.parameters)


def fewest_dims(case: FetchCase) -> int:
    return min(len(shape) for shape in case.parameters)


def has_strided_rows(case: FetchCase) -> bool:
    """True if some parameter has gaps in memory between the elements of its last dim."""
    return not case.contiguous and any(
        len(shape) == 1 or (math.prod(shape) > 0 and min(shape[-2:], default=0) > 1) for shape in case.parameters
    )
