"""Draws the values of a tensor that is multiplied."""

from __future__ import annotations

import torch

from equivtest.cases.values import draw
from equivtest.cases.values.integers import generator, odd_integers
from equivtest.cases.values.real import nearly_normal, without_subnormals
from equivtest.families.scale.case import ScaleCase
from equivtest.tensors import DTYPES


@draw.register
def draw_scale(case: ScaleCase, index: int) -> dict[str, torch.Tensor]:
    """Draws the global tensors x and cotangent, both of the case's shape.

    Modes:
        dense: Odd integers up to 31, whose multiples are exact in every dtype.
        real: Nearly normal numbers, whose multiples are rounded.
    """
    mode, seed = case.values[index]
    given = {}
    for name in case.given_names():
        source = generator(mode, seed, name)
        if mode == "dense":
            value = odd_integers(case.shape, 1, 31, source)
        else:
            value = without_subnormals(nearly_normal(case.shape, source))
        given[name] = value.to(DTYPES[case.dtype])
    return given
