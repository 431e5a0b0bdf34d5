"""What known failures ask of cases of this family, by name, in `where`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equivtest.families.training.deepspeed.case import EngineCase


def leaf_input_requires_grad(case: EngineCase) -> bool:
    """Whether autograd goes on beyond the leaf, to x; True where there is no leaf."""
    return not case.leaf or "x" in case.requires_grad
