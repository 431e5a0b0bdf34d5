"""Draws values of a linear layer that use all bits of the significand, so that every sum rounds.

Letters: T tokens, K in_features, N out_features; x (T, K), weight W (N, K), bias b (N,), cotangent G (T, N).
"""

from __future__ import annotations

import math

import torch

from equivtest.cases.values.integers import generator, hash_of
from equivtest.cases.values.real import nearly_normal
from equivtest.families.linear.case import LinearCase
from equivtest.layout import shard_bounds
from equivtest.tensors import DTYPES

_SCALES = (1.0, 0.07, 3.0)  # of x, weight and cotangent: far from overflow and from subnormals in float16
_BIAS_SCALES = (1.0, 0.2, 0.6)  # relative to the sum to which it is added
_CANCELLED_BITS = {"float64": 20, "float32": 10, "float16": 6, "bfloat16": 4}
"""Number of bits by which a sum is smaller than its terms. Pairs of terms must still differ in the dtype."""


def draw_real_linear(case: LinearCase, index: int) -> dict[str, torch.Tensor]:
    """Draws the global tensors x, weight, cotangent and, if the layer has one, bias.

    Modes:
        real: Nearly normal numbers. Each tensor has its own scale. The weight's scale is divided by the root of
            in_features, as layers are initialised.
        real-cancelling: Features come in pairs whose products nearly cancel in every output, so that an error of a term
            is far larger relative to the output than to the term. In float64 and float32 the distance between the two
            features of a pair is half the number of features, so that the partial sums of whole ranks cancel each
            other. In 16 bits the features of a pair are neighbours on one rank of a rowwise layer. If partial sums
            stored in 16 bits exceeded the output by much, nothing could be concluded. The weights of a feature without
            a partner are made so small that its products are as small as the sum of a pair's products.
    """
    mode, seed = case.values[index]
    scale = {name: _pick(f"{name} scale", mode, seed, _SCALES) for name in ("x", "weight", "cotangent")}
    scale["weight"] /= math.sqrt(case.in_features)
    shapes = {name: case.shapes()[name] for name in case.given_names()}
    values = {name: nearly_normal(shape, generator(mode, seed, name)) for name, shape in shapes.items()}
    size = math.sqrt(case.in_features) * scale["x"] * scale["weight"]  # of a sum of products
    if mode == "real-cancelling":
        size *= 2.0 ** -_CANCELLED_BITS[case.dtype]
        _cancel(values, case, seed)
    scale["bias"] = size * _pick("bias scale", mode, seed, _BIAS_SCALES)
    return {name: _without_zeros(value * scale[name]).to(DTYPES[case.dtype]) for name, value in values.items()}


def pairs_of(case: LinearCase) -> tuple[list[tuple[int, int]], list[int]]:
    """Returns the pairs of features whose products cancel, and the features without a partner."""
    num, half = case.in_features, case.in_features // 2
    if case.dtype in ("float64", "float32"):
        return [(feature, half + feature) for feature in range(half)], list(range(2 * half, num))
    num_shards = case.world_size if case.style == "rowwise" else 1
    pairs, alone = [], []
    for shard in range(num_shards):
        start, stop = shard_bounds(num, num_shards, shard)
        pairs += [(feature, feature + 1) for feature in range(start, stop - 1, 2)]
        alone += [stop - 1] if (stop - start) % 2 else []
    return pairs, alone


def _cancel(values: dict[str, torch.Tensor], case: LinearCase, seed: int) -> None:
    """Changes x and weight in place so that the products of each pair of features nearly cancel.

    In x the second feature of a pair gets nearly the values of the first feature. In the weight it gets nearly the
    negatives of the first feature's values.
    """
    smaller = 2.0 ** -_CANCELLED_BITS[case.dtype]
    pairs, alone = pairs_of(case)
    first, second = ([pair[side] for pair in pairs] for side in (0, 1))
    for name, sign in (("x", 1.0), ("weight", -1.0)):
        value = values[name]  # (*leading, K) or (N, K)
        apart = nearly_normal((*value.shape[:-1], len(pairs)), generator("real-cancelling", seed, f"{name} apart"))
        value[..., second] = sign * value[..., first] * (1 + smaller * apart)
    values["weight"][:, alone] *= smaller


def _pick(name: str, mode: str, seed: int, table: tuple[float, ...]) -> float:
    return table[hash_of(mode, seed, name) % len(table)]


def _without_zeros(value: torch.Tensor) -> torch.Tensor:
    """Replaces numbers that float16 would round to zero by the smallest normal number of float16."""
    return torch.where(value.abs() < 2.0**-24, 2.0**-14, value)
