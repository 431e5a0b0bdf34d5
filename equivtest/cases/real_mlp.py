"""Values of a perceptron of two layers that use their whole significand and make every sum round.

Letters: K in_features, H hidden_features, as in `equivtest.cases.mlp`.  How numbers are made:
`equivtest.cases.real_linear`.
"""

from __future__ import annotations

import math

import torch

from equivtest.cases.integers import generator, hash_of
from equivtest.cases.perceptron import PerceptronCase
from equivtest.cases.real_linear import nearly_normal, without_subnormals
from equivtest.tensors import DTYPES

_SCALES = (1.0, 0.3, 3.0)  # of x, each bias and each cotangent: far from overflow and subnormals in float16


def draw_real_mlp(case: PerceptronCase, index: int) -> dict[str, torch.Tensor]:
    """Global x, parameters and cotangent of each step: nearly normal numbers, each tensor with a scale of its own.

    Weights are divided by the root of what they sum over, as layers are initialised, so that the
    activation meets arguments of either sign on both sides of its bend.
    """
    mode, seed = case.values[index]
    sizes = {"in_proj.weight": 1 / math.sqrt(case.in_features), "out_proj.weight": 1 / math.sqrt(case.hidden_features)}
    given, shapes = {}, case.shapes()
    for name in case.given_names():
        size = sizes.get(name) or _SCALES[hash_of(mode, seed, f"{name} scale") % len(_SCALES)]
        value = nearly_normal(shapes[name], generator(mode, seed, name)) * size
        given[name] = without_subnormals(value).to(DTYPES[case.dtype_of(name)])
    return given
