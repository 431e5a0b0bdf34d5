"""What known failures ask of cases of this family, by name, in `where`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equivtest.families.collectives.case import CollectivesCase


def scatters_no_sum(case: CollectivesCase) -> bool:
    """Whether a call scatters another reduction than the sum."""
    return any("reduce_scatter" in call.function and call.op != "sum" for call in case.calls)
