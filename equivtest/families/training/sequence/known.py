"""What known failures ask of cases of this family, by name, in `where`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equivtest.families.training.sequence.case import MlpCase


def hidden_is_uneven(case: MlpCase) -> bool:
    """Whether ranks hold different amounts of the hidden features."""
    return case.hidden_features % case.world_size != 0


def uneven_sequence_is_merged(case: MlpCase) -> bool:
    """Whether x, gathered from uneven shards, is viewed with the sequence and dims before it made one.

    A strided x is copied instead where the weight needs a gradient.
    """
    is_strided = not case.x_contiguous and min(case.leading[-1], case.in_features) > 1
    if not case.sequence_is_uneven or (is_strided and "in_proj.weight" in case.requires_grad):
        return False
    merged = case.leading[:-1] if is_strided else case.leading
    return min(math.prod(merged[: case.sequence_dim]), math.prod(merged[case.sequence_dim :])) > 1
