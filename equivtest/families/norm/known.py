"""Predicates on cases of norms, for the conditions `where` in known_failures.toml."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equivtest.families.norm.case import NormCase


def num_frozen(case: NormCase) -> int:
    return sum(name not in case.requires_grad for name in case.parameters)


def num_trained(case: NormCase) -> int:
    return len(case.parameters) - num_frozen(case)
