"""Draws the values of a perceptron of two layers, exact or real."""

from __future__ import annotations

import torch

from equivtest.cases.values import draw
from equivtest.families.training.case import PerceptronCase
from equivtest.families.training.values.exact import draw_mlp
from equivtest.families.training.values.real import draw_real_mlp


@draw.register
def draw_mlp_case(case: PerceptronCase, index: int) -> dict[str, torch.Tensor]:
    return (draw_real_mlp if case.values[index][0] == "real" else draw_mlp)(case, index)
