"""Computes one linear layer on real values in float64, and bounds its errors.

Letters: T tokens, K in_features, N out_features, w ranks, r one of them; x (T, K), W (N, K), b (N,), cotangent G (T,
N).

One contraction is split over the ranks, because the contract shards the weight. In a rowwise layer this is the output,
over K. In a colwise layer this is grad.x, over N. Each rank sums its own shard, so P, the sum of the magnitudes of the
ranks' partial sums, is known. If a subject does not split the contraction, fewer numbers are rounded. One rank computes
all other sums.

`equivtest.oracle.contractions` derives the bounds.
"""

from __future__ import annotations

import math

import torch

from equivtest.base import limits
from equivtest.cases.values import draw
from equivtest.families.linear.case import LinearCase
from equivtest.layout import shard_bounds
from equivtest.oracle.contractions import linear, linear_grad_bias, linear_grad_weight, linear_grad_x
from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.expected import COPIED, Expected, ExpectedTensor
from equivtest.oracle.rounding import Arithmetic, Bounded


def expect_real_linear(case: LinearCase, index: int) -> Expected:
    given = draw(case, index)
    shapes, layouts, flags = case.shapes(), case.layouts(), case.given_flags()
    arithmetic = arithmetic_of(case.dtype)
    tensors = {}
    for name, found in bound_linear(case, given, arithmetic).items():
        tensors[name] = ExpectedTensor(
            value=found.value.reshape(shapes[name]),
            allowed=found.allowed.reshape(shapes[name]),
            layout=layouts[name],
            dtype=case.dtype,
            derivation=found.derivation,
            requires_grad=bool(case.requires_grad) if name == "output" else flags.get(name),
            is_symmetric=arithmetic.rounds_to_nearest and _is_symmetric(case, name, given),
        )
    for name in case.parameter_names():
        tensors[f"param.{name}"] = ExpectedTensor(
            value=given[name].to(torch.float64),
            allowed=None,
            layout=layouts[f"param.{name}"],
            dtype=case.dtype,
            derivation=COPIED,
            requires_grad=flags[name],
        )
    return Expected({name: tensors[name] for name in case.answer_names()}, {})


def bound_linear(case: LinearCase, given: dict[str, torch.Tensor], arithmetic: Arithmetic) -> dict[str, Bounded]:
    """Returns the output and gradients by name, each with its bound. Leading dims are flattened."""
    x, weight = given["x"].reshape(-1, case.in_features), given["weight"]  # (T, K), (N, K)
    cotangent = given["cotangent"].reshape(-1, case.out_features)  # (T, N)
    w, bias = case.world_size, given.get("bias")
    answers = {}
    if case.style == "rowwise":
        partials = partial_magnitudes(x, weight.T, w)
        answers["output"] = linear(x, weight, bias, arithmetic, ranks=w, partials=partials)
    else:
        answers["output"] = linear(x, weight, bias, arithmetic)
    if "x" in case.requires_grad and case.style == "colwise":
        partials = partial_magnitudes(cotangent, weight, w)
        answers["grad.x"] = linear_grad_x(cotangent, weight, arithmetic, ranks=w, partials=partials)
    elif "x" in case.requires_grad:
        answers["grad.x"] = linear_grad_x(cotangent, weight, arithmetic)
    if "weight" in case.requires_grad:
        answers["grad.weight"] = linear_grad_weight(cotangent, x, arithmetic)
    if "bias" in case.requires_grad:
        answers["grad.bias"] = linear_grad_bias(cotangent, arithmetic)
    return answers


def partial_magnitudes(left: torch.Tensor, right: torch.Tensor, ranks: int) -> torch.Tensor:
    """Returns, for each element of `left @ right`, the sum of the absolute values of the ranks' partial sums.

    The ranks divide the contracted dim as torch.chunk does.
    """
    partials = torch.zeros((left.shape[0], right.shape[1]), dtype=torch.float64)
    for rank in range(ranks):
        start, stop = shard_bounds(left.shape[1], ranks, rank)
        partials += (left[:, start:stop].double() @ right[start:stop].double()).abs()
    return partials


def _is_symmetric(case: LinearCase, name: str, given: dict[str, torch.Tensor]) -> bool:
    """True if the errors of the answer `name` prefer no sign, and no two elements share a rounding.

    Elements of a rowwise output share the rounding of bias / (number of ranks). The quotient does not round if the
    number of ranks is a power of two and the bias is so large that no subnormal number loses its last bit. Errors may
    prefer a sign if a sum has few terms: a single product with 1 + 2**-7 in bfloat16 falls below its rounded value more
    often than above.
    """
    tokens = math.prod(case.leading)
    num_terms = {"output": case.in_features, "grad.x": case.out_features}.get(name, tokens)
    shares = name == "output" and case.style == "rowwise" and case.bias and _is_rounded(given["bias"], case.world_size)
    return num_terms >= limits.LEAN_TERMS and not shares


def _is_rounded(bias: torch.Tensor, ranks: int) -> bool:
    """True if dividing the bias by the number of ranks, or multiplying it by the reciprocal, rounds."""
    if ranks & (ranks - 1):
        return True
    return not torch.equal((bias.double() / ranks).to(bias.dtype).double() * ranks, bias.double())
