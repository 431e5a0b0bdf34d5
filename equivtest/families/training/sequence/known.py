"""Predicates on cases of sequence parallelism, for the conditions `where` in known_failures.toml."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equivtest.families.training.sequence.case import MlpCase


def hidden_is_uneven(case: MlpCase) -> bool:
    return case.hidden_features % case.world_size != 0
