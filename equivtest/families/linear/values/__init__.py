"""Draws the values of a linear layer, exact or real."""

from __future__ import annotations

import torch

from equivtest.cases.values import draw
from equivtest.cases.values.integers import other_dtype
from equivtest.families.linear.case import REAL_MODES, LinearCase, RefusedLinearCase
from equivtest.families.linear.values.exact import draw_linear
from equivtest.families.linear.values.real import draw_real_linear


@draw.register
def draw_linear_case(case: LinearCase, index: int) -> dict[str, torch.Tensor]:
    return (draw_real_linear if case.values[index][0] in REAL_MODES else draw_linear)(case, index)


@draw.register
def draw_refused_linear(case: RefusedLinearCase, index: int) -> dict[str, torch.Tensor]:
    given = draw_linear_case(case, index)
    if case.misfit == "in_features":
        given["x"] = torch.cat([given["x"], given["x"][..., :1]], dim=-1)
    else:
        given["x"] = given["x"].to(other_dtype(case.dtype))
    return given
