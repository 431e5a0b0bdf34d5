"""Predicates on cases of this family that known failures name in `where`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equivtest.families.training.deepspeed.case import EngineCase


def leaf_input_requires_grad(case: EngineCase) -> bool:
    """True if autograd continues beyond the leaf, to x; also if there is no leaf."""
    return not case.leaf or "x" in case.requires_grad
