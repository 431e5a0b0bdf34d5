"""Predicates on perceptron cases, for the conditions `where` in known_failures.toml."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equivtest.families.training.case import PerceptronCase


def last_leading(case: PerceptronCase) -> int:
    return case.leading[-1]


def has_sharded_gradient(case: PerceptronCase) -> bool:
    """True if a parameter that has a dim of hidden features, such as a weight, needs a gradient."""
    return any(name not in ("x", "out_proj.bias") for name in case.requires_grad)
