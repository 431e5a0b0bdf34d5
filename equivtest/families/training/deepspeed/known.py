"""Predicates on engine cases, for the conditions `where` in known_failures.toml."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equivtest.families.training.deepspeed.case import EngineCase


def leaf_input_requires_grad(case: EngineCase) -> bool:
    """True if the case has no leaf module, or if x needs a gradient, which passes through the leaf module."""
    return not case.leaf or "x" in case.requires_grad
