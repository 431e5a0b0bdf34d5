"""Predicates on cases of differentiable collectives, for the conditions `where` in known_failures.toml."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equivtest.families.differentiable.case import DifferentiableCase


def calls_in_other_group(case: DifferentiableCase) -> bool:
    """True if some rank's number in its group differs from its number in the world."""
    return any(number != process for group in case.groups for number, process in enumerate(group))
