"""Draws the tensors of a case from its seeds, equal on every rank and in the parent process.

A package that defines a case class registers a function that draws the values:

    @draw.register
    def draw_mine(case: MyCase, index: int) -> dict[str, torch.Tensor]: ...
"""

from __future__ import annotations

import torch

from equivtest.cases.case import Case
from equivtest.cases.parts import by_case
from equivtest.errors import Misuse


@by_case("values")
def draw(case: Case, index: int) -> dict[str, torch.Tensor]:
    """Draws the global tensors that the harness passes for one draw of a case.

    The tensors depend on the draw's (mode, seed), on the name of each tensor and on the fields of the case that fix
    shapes, dtype and limits. They never depend on torch's global generator.

    Args:
        index: Index into case.values.

    Returns:
        Name -> global tensor, for each name in `case.given_names()`. The tensors are contiguous and on the CPU. They
            have the case's dtype, unless a case outside the contract declares another dtype.

    Raises:
        Misuse: no function is registered for the class of the case.
        IndexError: the case has no such draw.
    """
    raise Misuse(
        f"no values are registered for {type(case).__name__}: decorate the function that draws them with "
        "equivtest.cases.values.draw.register, in the module that defines the class"
    )
