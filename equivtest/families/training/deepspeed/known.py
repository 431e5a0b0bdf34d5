"""Predicates on engine cases, which `where` of an entry in known_failures.toml names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equivtest.families.training.deepspeed.case import EngineCase


def leaf_input_requires_grad(case: EngineCase) -> bool:
    """True if the case has no leaf module, or if x needs a gradient.

    In the second case the backward passes through the leaf.
    """
    return not case.leaf or "x" in case.requires_grad
