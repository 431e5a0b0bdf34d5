"""Draws values of a linear layer that no floating-point operation rounds, in any order and any split.

Letters: T tokens, K in_features, N out_features, w ranks, p significand bits of the dtype.
Tensors are flat here: x (T, K), weight W (N, K), bias b (N,), cotangent G (T, N).

Derived here. Every tensor holds integers times one power of two. The layer has four contractions: output x W^T + b,
grad.x G W, grad.weight G^T x, grad.bias sum_t G. Let the magnitudes of the terms of each contraction add up to at most
2**p. Then every partial sum, of any subset of the terms, is an integer up to 2**p times a power of two, so it is a
value of the dtype. Therefore no order, no blocking and no division among ranks rounds. The oracle checks this of every
draw.

DTensor divides a replicated bias by w when it makes it partial, so b is a multiple of w. Its magnitude is at most an
eighth of the output's limit 2**p, or w if w is larger.

Source: derived here except Partial._partition_value in
torch.distributed.tensor.placement_types (2.13.0); integers up to 2**p are values: IEEE 754-2019
section 3.3 (every value is an integer below 2**p times a power of two, and 2**p is one as well).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from equivtest.cases.values.integers import generator, hash_of, odd_floor, odd_integers, permutation, signs
from equivtest.families.linear.case import LinearCase
from equivtest.families.linear.values.magnitudes import choose_magnitudes, lowest
from equivtest.tensors import DTYPES, SIGNIFICAND_BITS

_LOWEST_EXPONENT = -3  # of a tensor's power of two; float16 stays far above its subnormals
_NAMES = ("x", "weight", "cotangent")


@dataclass(frozen=True)
class _Plan:
    """Holds sizes and limits for the values of one draw.

    Attributes:
        limit: Limit for every sum. The magnitudes of the terms of a sum add up to at most this limit, which is 2**p for
            the p significand bits of the dtype.
        bias_limit: Largest magnitude of the bias. It is an odd multiple of the number of ranks, or 0 if there is no
            bias.
    """

    mode: str
    seed: int
    num_tokens: int
    in_features: int
    out_features: int
    limit: int
    bias_limit: int

    @property
    def output_limit(self) -> int:
        """Limit for the magnitudes of the products behind one output element, to which the bias is added."""
        return self.limit - self.bias_limit

    def source(self, name: str) -> torch.Generator:
        return generator(self.mode, self.seed, name)

    def pick(self, name: str, count: int) -> int:
        return hash_of(self.mode, self.seed, name) % count


def draw_linear(case: LinearCase, index: int) -> dict[str, torch.Tensor]:
    """Draws the global tensors x, weight, cotangent and, if the layer has one, bias.

    Modes:
        dense: All values are odd integers, so that no product is zero and no dropped or doubled term is hidden. One row
            or column of each tensor is near its largest magnitude, so that a reduction in fewer than p bits shows: for
            some output element, the magnitudes of the products add up to at least 2**(p - 1), if T, K and N are at most
            2**p / 4. With larger sizes the magnitudes may add up to less: 100 odd products in bfloat16 add up to 100 or
            to 300, and 256 is the limit. The gradients of x and weight have sums of at least 2**(p - 1) too, in float32
            and float64 always, and in float16 and bfloat16 mostly, because the three sums share three magnitudes.
        wide-x: The integers of x take all significand bits of the dtype. Each row of the weight is zero, except for 1
            or -1 at one feature. Each column of the cotangent is zero, except for 1 or -1 at one token.
        wide-w: The integers of the weight take all significand bits of the dtype. Each token of x is zero, except for 1
            or -1 at one feature. Each row of the cotangent is zero, except for 1 or -1 at one output feature.
        wide-g: Each column of the cotangent is zero, except at one token. The element at this token is an integer that
            has all significand bits of the dtype. x has 1 and -1 only. Each column of the weight is zero, except for 1
            or -1 at one output feature.

    If a sum of ones alone is more than 2**p (bfloat16: sizes above 256), zeros replace as many terms as necessary, at
    places drawn anew for every seed.
    """
    mode, seed = case.values[index]
    limit = 2 ** SIGNIFICAND_BITS[case.dtype]
    odd = odd_floor(max(1, limit // 8 // case.world_size))
    plan = _Plan(
        mode,
        seed,
        math.prod(case.leading),
        case.in_features,
        case.out_features,
        limit,
        odd * case.world_size if case.bias else 0,
    )
    integers = dict(zip(_NAMES, _DRAW_MODE[mode](plan), strict=True))
    exponents = {name: _LOWEST_EXPONENT + plan.pick(f"{name} exponent", 1 - _LOWEST_EXPONENT) for name in _NAMES}
    if case.bias:
        integers["bias"] = odd_integers((case.out_features,), 1, odd, plan.source("bias")) * case.world_size
        exponents["bias"] = exponents["x"] + exponents["weight"]
    shapes = case.shapes()
    return {
        name: integers[name].to(DTYPES[case.dtype]).mul_(2.0 ** exponents[name]).view(shapes[name])
        for name in case.given_names()
    }


# ------------------------------------------------------------------------------------------------
# dense


def _draw_dense(plan: _Plan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, features, outputs = plan.num_tokens, plan.in_features, plan.out_features
    size = choose_magnitudes(
        min(tokens, plan.limit),
        min(features, plan.output_limit),
        min(outputs, plan.limit),
        plan.limit,
        plan.output_limit,
    )
    token, feature, output = plan.pick("token", tokens), plan.pick("feature", features), plan.pick("output", outputs)

    source = plan.source("x")
    x = odd_integers((tokens, features), 1, size.x, source)
    x[token] = _near(size.x, features, source)
    x[:, feature] = _near(size.x_peak, tokens, source)
    if features > plan.output_limit:
        x *= _features_kept(plan, source)

    source = plan.source("weight")
    weight = odd_integers((outputs, features), 1, size.weight, source)
    weight[:, feature] = _near(size.weight, outputs, source)
    weight[output] = _near(size.weight_peak, features, source)

    source = plan.source("cotangent")
    cotangent = odd_integers((tokens, outputs), 1, size.cotangent, source)
    cotangent[:, output] = _near(size.cotangent, tokens, source)
    cotangent[token] = _near(size.cotangent_peak, outputs, source)
    if max(tokens, outputs) > plan.limit:
        cotangent *= _cotangents_kept(plan, source)
    return x, weight, cotangent


def _near(magnitude: int, length: int, source: torch.Generator) -> torch.Tensor:
    """Draws `length` odd integers from seven eighths of `magnitude`, which is odd, up to `magnitude`."""
    return odd_integers((length,), lowest(magnitude), magnitude, source)


def _features_kept(plan: _Plan, source: torch.Generator) -> torch.Tensor:
    """Returns a mask (tokens, in_features) that keeps `output_limit` features of each token.

    The features form a ring, in random order. Each token keeps the features that follow the last kept feature of the
    token before.
    """
    starts = torch.arange(plan.num_tokens, device="cpu") * plan.output_limit
    places = permutation(plan.in_features, source)
    return (starts[:, None] + places) % plan.in_features < plan.output_limit


def _cotangents_kept(plan: _Plan, source: torch.Generator) -> torch.Tensor:
    """Returns a random mask (tokens, out_features) with at most `limit` kept elements in each row and column."""
    longer = max(plan.num_tokens, plan.out_features)
    rows = permutation(plan.num_tokens, source) * (longer // plan.num_tokens)
    columns = permutation(plan.out_features, source) * (longer // plan.out_features)
    return (rows[:, None] + columns) % longer < plan.limit


# ------------------------------------------------------------------------------------------------
# wide


def _draw_wide_x(plan: _Plan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draws the int64 tensors x, weight and cotangent for mode wide-x.

    The terms behind one element of an answer have magnitudes that add up to the following sums, where |x| and |b| are
    the largest magnitudes of x and of the bias:

        output        |x| + |b|
        grad.x        at most min(out_features, limit)
        grad.weight   |x|
        grad.bias     1
    """
    x = _whole_significand(plan, (plan.num_tokens, plan.in_features), plan.source("x"))
    weight = _select(plan.out_features, plan.in_features, plan.out_features, plan.source("weight"))
    cotangent = _select(plan.out_features, plan.num_tokens, plan.limit, plan.source("cotangent"))
    return x, weight, cotangent.T.contiguous()


def _draw_wide_w(plan: _Plan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draws the int64 tensors x, weight and cotangent for mode wide-w.

    The terms behind one element of an answer have magnitudes that add up to the following sums, where |W| and |b| are
    the largest magnitudes of the weight and of the bias:

        output        |W| + |b|
        grad.x        |W|
        grad.weight   at most min(tokens, limit)
        grad.bias     at most min(tokens, limit)
    """
    x = _select(plan.num_tokens, plan.in_features, plan.num_tokens, plan.source("x"))
    weight = _whole_significand(plan, (plan.out_features, plan.in_features), plan.source("weight"))
    cotangent = _select(plan.num_tokens, plan.out_features, plan.limit, plan.source("cotangent"))
    return x, weight, cotangent


def _draw_wide_g(plan: _Plan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draws the int64 tensors x, weight and cotangent for mode wide-g.

    The terms behind one element of an answer have magnitudes that add up to the following sums, where |G| and |b| are
    the largest magnitudes of the cotangent and of the bias:

        output        at most min(in_features, limit - |b|) + |b|
        gradients     |G|
    """
    x = signs((plan.num_tokens, plan.in_features), plan.source("x"))
    weight = _select(plan.in_features, plan.out_features, plan.output_limit, plan.source("weight"))
    source = plan.source("cotangent")
    tokens = _select(plan.out_features, plan.num_tokens, plan.out_features, source)
    cotangent = tokens * _whole_significand(plan, (plan.out_features, plan.num_tokens), source)
    return x, weight.T.contiguous(), cotangent.T.contiguous()


def _whole_significand(plan: _Plan, shape: tuple[int, int], source: torch.Generator) -> torch.Tensor:
    return odd_integers(shape, plan.limit // 2 + 1, odd_floor(plan.output_limit - 1), source)


def _select(num_rows: int, num_columns: int, num_selecting: int, source: torch.Generator) -> torch.Tensor:
    """Returns a matrix of zeros, except for 1 or -1 in a random column of each of `num_selecting` random rows.

    No column gets a second such element before every column has one.
    """
    rows = permutation(num_rows, source)[:num_selecting]
    columns = permutation(num_columns, source)[torch.arange(len(rows), device="cpu") % num_columns]
    selected = torch.zeros((num_rows, num_columns), dtype=torch.int64, device="cpu")
    selected[rows, columns] = signs((len(rows),), source)
    return selected


_DRAW_MODE: dict[str, Callable[[_Plan], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    "dense": _draw_dense,
    "wide-x": _draw_wide_x,
    "wide-w": _draw_wide_w,
    "wide-g": _draw_wide_g,
}
