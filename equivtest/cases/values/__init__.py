"""Draws the tensors that the seeds of a case determine: the same on every rank and in the parent process.

A package with its own case class registers how its values are drawn:

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

    They depend on the draw's (mode, seed), on the name of each tensor and on the fields of the case
    that fix shapes, dtype and limits; never on torch's global generator.

    Args:
        index: Index into case.values.

    Returns:
        name -> global tensor, contiguous, on the CPU, of the case's dtype (unless a refused case
        says otherwise), for every one of case.given_names().

    Raises:
        Misuse: no function is registered for this class.
        IndexError: the case has no such draw.
    """
    raise Misuse(
        f"no values are registered for {type(case).__name__}: decorate the function that draws them with "
        "equivtest.cases.values.draw.register, in the module that defines the class"
    )
