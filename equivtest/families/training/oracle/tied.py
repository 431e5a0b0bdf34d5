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
    """Returns the weight (out_features, hidden_features) by which the second layer multiplies."""
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
        in_use: Gradient of in_proj's output, and in_proj's input x, each with one row per row of the batch. The
            gradient has no elements if the backward does not reach in_proj.
        out_use: Cotangent and hidden activation, each with one row per row of the batch.
    """
    pairs = [in_use] if in_use[0].numel() else []
    pairs.append(out_use if case.tied == "same" else (out_use[1], out_use[0]))
    pairs = [_in_units_of(pairs[0][0], *pair) for pair in pairs]
    num_blocks = averages.ranks * averages.micro_batches
    left, right = (_by_block(sides, num_blocks) for sides in zip(*pairs, strict=True))
    return replace(averages, micro_batches=averages.micro_batches * len(pairs)).product(left.T, right)


def _by_block(tensors: Sequence[torch.Tensor], num_blocks: int) -> torch.Tensor:
    """Joins the tensors' rows block by block. Block 1 of each tensor comes first, then block 2 of each tensor.

    A block is one micro-batch of one rank.
    """
    blocks = zip(*(tensor.chunk(num_blocks) for tensor in tensors), strict=True)
    return torch.cat([use for uses in blocks for use in uses])


def _in_units_of(first: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `left` and `right` after a power of two was moved from one tensor to the other.

    The product of the two tensors stays the same.

    A tensor's unit is the largest power of two that divides all its elements. The returned `left` has the unit of
    `first`, so that the left factors of several products can be joined in one tensor with that unit. If a tensor has no
    unit, both tensors are returned unchanged.
    """
    try:
        power = 2.0 ** (find_integers("first", first).exponent - find_integers("left", left).exponent)
    except InexactData:
        return left, right
    return left * power, right / power
