"""What known failures ask of cases of this family, by name, in `where`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equivtest.families.training.sequence.case import MlpCase


def hidden_is_uneven(case: MlpCase) -> bool:
    """Whether ranks hold different amounts of the hidden features."""
    return case.hidden_features % case.world_size != 0
