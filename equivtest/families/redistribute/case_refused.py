"""Defines redistributions to placements that the tensor or its mesh cannot have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from equivtest.cases.case import Refused, require
from equivtest.cases.rules import OneOf
from equivtest.families.redistribute.case import RedistributeCase

MISFITS = ("to_partial", "too_many", "too_few", "dim")


@dataclass(frozen=True, kw_only=True, repr=False)
class RefusedRedistributeCase(Refused, RedistributeCase):
    """Describes a redistribution that every rank must refuse with the same error. The field `target` is valid.

    Attributes:
        misfit: The invalid request that replaces the target. 'to_partial' requests partial sums although the tensor is
            not partial. 'too_many' and 'too_few' request one placement more or fewer than there are mesh axes. 'dim'
            requests that the first axis shards a dim that the tensor does not have.
    """

    misfit: Annotated[str, OneOf(MISFITS)] = "to_partial"
    requires_grad: tuple[str, ...] = ()

    def check_fields(self) -> None:
        super().check_fields()
        require(self.road == "dtensor", f"a refused redistribution must have road='dtensor', got {self.road!r}")
        require(
            not any(text.startswith("partial") for text in self.source),
            f"the source of a refused redistribution must not be partial, got {self.source}",
        )

    @property
    def refusal(self) -> str:
        return f"the requested placements do not fit: {self.misfit}"
