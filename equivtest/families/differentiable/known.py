"""Predicates of known failures on cases of this family, by name, in `where`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equivtest.families.differentiable.case import DifferentiableCase


def calls_in_other_group(case: DifferentiableCase) -> bool:
    """True if ranks have other numbers in their group than in the world."""
    return any(number != process for group in case.groups for number, process in enumerate(group))
