"""Draws the values of a norm."""

from __future__ import annotations

import torch

from equivtest.cases.values import draw
from equivtest.cases.values.integers import generator, hash_of, permutation, signs
from equivtest.cases.values.real import nearly_normal, without_subnormals
from equivtest.families.norm.case import NormCase
from equivtest.tensors import DTYPES

_SCALES = {"x": (1.0, 0.1, 3.0), "weight": (1.0, 0.5), "bias": (1.0, 0.2), "cotangent": (1.0, 0.1, 3.0)}
_OFFSETS = {"x": (0.0, 0.5, -1.0), "weight": (0.0, 1.0)}  # in scales: a mean for layer_norm, and weights near one
_PERIODS = {"x": 1, "cotangent": 2}  # of features on one side, in a common order: the patterns are orthogonal
_FEW_FEATURES = 3  # a norm of so few leaves little but signs, unless eps is as large as their squares


@draw.register
def draw_norm(case: NormCase, index: int) -> dict[str, torch.Tensor]:
    """Draws the global x and cotangent, and the weight and the bias if the layer has them.

    Values are nearly normal and never zero. Each tensor has its own scale. x may have a mean that is not zero, and
    weights may lie around one.

    In x and in the cotangent, most elements of a feature lie on one side of the tensor's mean: above the mean for half
    of the features, and below the mean for the other half. So the terms of a parameter's gradient, which is a sum over
    tokens, mostly add up. The features above the mean differ between x and the cotangent, because a cotangent that
    combines ones and x - mean gives a zero gradient of x.
    """
    mode, seed = case.values[index]
    order = permutation(case.features, generator(mode, seed, "order of sides"))
    given, shapes = {}, case.shapes()
    for name in case.given_names():
        scales, offsets = _SCALES[name], _OFFSETS.get(name, (0.0,))
        scale, offset = scales[hash_of(mode, seed, f"{name} scale") % len(scales)], offsets[seed % len(offsets)]
        if name == "x" and case.features <= _FEW_FEATURES:
            scale = min(scale, 0.25)
        value = (nearly_normal(shapes[name], generator(mode, seed, name)) + offset) * scale
        if name in _PERIODS:
            turned = order // _PERIODS[name] % 2 == 1
            side = signs((), generator(mode, seed, f"{name} side"))
            value = value + scale * torch.where(turned, -side, side)
        given[name] = without_subnormals(value).to(DTYPES[case.dtype])
    return given
