"""Draws values of a perceptron that use all bits of the significand, so that every sum rounds.

Letters: K in_features, H hidden_features, as in `equivtest.families.training.sequence.case`.
`equivtest.families.linear.values.real` says how numbers are drawn.

A gradient of a parameter is a sum over tokens. If its terms lie around zero, the sum may be far smaller than the terms.
In 16 bits, rounding errors may then be as large as the sum, and a tensor of one element would prove nothing. So most
elements of each feature of x and of the cotangents have the same sign. The sign is drawn for each feature and kept in
every step. The terms then mostly add up instead of cancelling, and so do the gradients that an optimizer averages over
steps.
"""

from __future__ import annotations

import math

import torch

from equivtest.cases.values.integers import generator, hash_of, signs
from equivtest.cases.values.real import nearly_normal, without_subnormals
from equivtest.families.training.case import PerceptronCase, base_of
from equivtest.tensors import DTYPES

_SCALES = (1.0, 0.3, 3.0)  # of x, each bias and each cotangent: far from overflow and subnormals in float16
_OFFSETS = (1.0, 2.0, 0.5)  # of x and of cotangents, in units of their scale
_FEW = 3  # elements of a weight, which a few steps of AdamW may reduce to almost nothing


def draw_real_mlp(case: PerceptronCase, index: int) -> dict[str, torch.Tensor]:
    """Draws the global x, the parameters and each step's cotangent as nearly normal numbers of several scales.

    Each tensor has its own scale. Weights are divided by the root of the number of summed terms, as layers are
    initialised, so that the activation gets arguments of either sign on both sides of its bend. The weights of most
    hidden features get such signs that a token activates the feature. Each feature has a different token. Cotangents
    are divided by the number of tokens of a gradient's sum, like the gradient of a mean. Without this, float16 would
    overflow soon, because training continues from the updated parameters. AdamW moves a bias by the learning rate, for
    any gradient. So out_proj's bias begins on the side of zero from which it moves away. The elements of in_proj's
    bias, and of a weight of few elements, begin with magnitudes of at least 1.
    """
    mode, seed = case.values[index]
    sizes = {"in_proj.weight": 1 / math.sqrt(case.in_features), "out_proj.weight": 1 / math.sqrt(case.hidden_features)}
    rows = math.prod(case.batch) // case.num_averaged
    given, shapes = {}, case.shapes()
    for name in case.given_names():
        size = sizes.get(name) or _SCALES[hash_of(mode, seed, f"{name} scale") % len(_SCALES)]
        value = nearly_normal(shapes[name], generator(mode, seed, name))
        if base_of(name) in ("x", "cotangent"):
            offset = _OFFSETS[hash_of(mode, seed, f"{name} offset") % len(_OFFSETS)]
            value = value + offset * signs(shapes[name][-1:], generator(mode, seed, f"{base_of(name)} sides"))
        if name == "out_proj.bias" and case.optimizer == "adamw":
            value = -value.abs() * signs(shapes[name], generator(mode, seed, "cotangent sides"))
        if name == "in_proj.bias" and case.optimizer == "adamw":
            value, size = value + value.sign(), max(size, 1.0)
        if name in sizes and case.optimizer == "adamw" and value.numel() <= _FEW:
            value, size = value + value.sign(), max(size, 1.0)
        if base_of(name) == "cotangent":
            size = size * 2.0 ** -round(math.log2(rows))
        given[name] = value * size
    _activate(given, case, hash_of(mode, seed, "active token"))
    return {name: without_subnormals(value).to(DTYPES[case.dtype_of(name)]) for name, value in given.items()}


def _activate(given: dict[str, torch.Tensor], case: PerceptronCase, first: int) -> None:
    """Changes the signs of weights and biases of hidden features, so that tokens activate them.

    Each feature belongs to a token: the first to token number `first`, the next to the next token. If the feature's sum
    of products is negative for its token, all signs of the feature change, except in every fourth feature.
    """
    x, weight = given["x"].reshape(-1, case.in_features), given["in_proj.weight"]
    hidden = torch.arange(case.hidden_features, device="cpu")
    before = (x[(hidden + first) % len(x)] * weight).sum(1)
    if "in_proj.bias" in given:
        before = before + given["in_proj.bias"]
    turned = torch.where((before < 0) & (hidden % 4 != 3), -1.0, 1.0)
    given["in_proj.weight"] = weight * turned[:, None]
    if "in_proj.bias" in given:
        given["in_proj.bias"] = given["in_proj.bias"] * turned
