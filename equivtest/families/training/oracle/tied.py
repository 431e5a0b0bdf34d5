"""Computes, for a weight that both layers of a perceptron share, its form in out_proj and its gradient.

Letters: R rows of the batch, H hidden_features, K = N in_features and out_features; W (H, K), a' the gradient of
in_proj's output, G the cotangent, h the hidden activation.

    out_proj has W, H = K:    grad W = a'^T x + G^T h
    out_proj has W^T:         grad W = a'^T x + h^T G

by the chain rule, as one sum with the terms of both layers. For each micro-batch a rank stores one product per layer
and adds the products in any order, before it reduces them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from equivtest.families.training.case import PerceptronCase
from equivtest.oracle.averages import Averages
from equivtest.oracle.exact import InexactData, find_integers
from equivtest.oracle.operations import Found

ONE_STORAGE = Found(torch.tensor(1.0, dtype=torch.float64), None, "equal: one parameter, whatever its places")


def weight_of_out_proj(case: PerceptronCase, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    weight = parameters[case.parameter_at("out_proj.weight")]
    return weight.T if case.tied == "transposed" else weight


def grad_of_tied(
    case: PerceptronCase,
    averages: Averages,
    in_use: tuple[torch.Tensor, torch.Tensor],
    out_use: tuple[torch.Tensor, torch.Tensor],
) -> Found:
    """Returns the tied weight's gradient (hidden_features, in_features), averaged over the ranks.

    Args:
        in_use: Gradient of in_proj's output, without elements if the backward does not reach in_proj, and x.
        out_use: Cotangent and hidden activation.
    """
    pairs = [in_use] if in_use[0].numel() else []
    pairs.append(out_use if case.tied == "same" else (out_use[1], out_use[0]))
    pairs = [_in_units_of(pairs[0][0], *pair) for pair in pairs]
    num_blocks = averages.ranks * averages.micro_batches
    left, right = (_by_block(sides, num_blocks) for sides in zip(*pairs, strict=True))
    return replace(averages, micro_batches=averages.micro_batches * len(pairs)).product(left.T, right)


def _by_block(tensors: Sequence[torch.Tensor], num_blocks: int) -> torch.Tensor:
    """Joins the tensors' rows: block 1 of each tensor, then block 2. A block is one micro-batch of one rank."""
    blocks = zip(*(tensor.chunk(num_blocks) for tensor in tensors), strict=True)
    return torch.cat([use for uses in blocks for use in uses])


def _in_units_of(first: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Moves a power of two from one factor of a product to the other, so that `left` has the unit of `first`.

    A tensor's unit is the largest power of two that divides all its elements. With one unit, the left factors of
    several products can be joined in one tensor. A tensor without a unit changes nothing.
    """
    try:
        power = 2.0 ** (find_integers("first", first).exponent - find_integers("left", left).exponent)
    except InexactData:
        return left, right
    return left * power, right / power
