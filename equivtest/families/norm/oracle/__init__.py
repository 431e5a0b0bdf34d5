"""Computes one layer_norm or rms_norm on real values in float64, and bounds the errors of a correct subject.

Ranks exchange only the gradients of weight and bias, which are summed over all tokens.

`equivtest.families.norm.oracle.norms` derives the bounds.
"""

from __future__ import annotations

import torch

from equivtest.cases.values import draw
from equivtest.families.norm.case import NormCase
from equivtest.families.norm.oracle.norms import norm, norm_grad_bias, norm_grad_weight, norm_grad_x
from equivtest.layout import shard_bounds
from equivtest.oracle import expect
from equivtest.oracle.collectives import Collectives, expected_collectives
from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.expected import COPIED, Expected, ExpectedTensor
from equivtest.oracle.rounding import Bounded


@expect.register
def expect_norm(case: NormCase, index: int) -> Expected:
    given, found = draw(case, index), bound_norm(case, index)
    shapes, layouts, flags = case.shapes(), case.layouts(), case.given_flags()
    tensors = {}
    for name in case.answer_names():
        copied = name.startswith("param.")
        value = given[name.removeprefix("param.")].double() if copied else found[name].value
        tensors[name] = ExpectedTensor(
            value=value.reshape(shapes[name]),
            allowed=None if copied else found[name].allowed.reshape(shapes[name]),
            layout=layouts[name],
            dtype=case.dtype,
            derivation=COPIED if copied else found[name].derivation,
            requires_grad=bool(case.requires_grad) if name == "output" else flags.get(name.removeprefix("param.")),
        )
    return Expected(tensors, {})


def bound_norm(case: NormCase, index: int) -> dict[str, Bounded]:
    """Returns every computed answer by name, with its bound. Leading dims are flattened."""
    given, arithmetic = draw(case, index), arithmetic_of(case.dtype)
    x, cotangent = (given[name].reshape(-1, case.features) for name in ("x", "cotangent"))  # (T, D)
    weight = given.get("weight", torch.ones(case.features))
    bias = given.get("bias", torch.zeros(case.features))
    eps, centered = case.eps, case.norm == "layer_norm"
    rank_of = _rank_of_tokens(case)
    answers = {"output": norm(x, weight, bias, arithmetic, eps=eps, centered=centered)}
    if "x" in case.requires_grad:
        answers["grad.x"] = norm_grad_x(x, weight, cotangent, arithmetic, eps=eps, centered=centered)
    if "weight" in case.requires_grad:
        answers["grad.weight"] = norm_grad_weight(x, cotangent, arithmetic, rank_of=rank_of, eps=eps, centered=centered)
    if "bias" in case.requires_grad:
        answers["grad.bias"] = norm_grad_bias(cotangent, arithmetic, rank_of=rank_of)
    return answers


def _rank_of_tokens(case: NormCase) -> torch.Tensor:
    """Returns for each token the rank that has the token."""
    along = torch.empty(case.sequence_length, dtype=torch.int64)
    for rank in range(case.world_size):
        start, stop = shard_bounds(case.sequence_length, case.world_size, rank)
        along[start:stop] = rank
    others = [case.sequence_length if dim == case.sequence_dim else 1 for dim in range(len(case.leading))]
    return along.view(others).expand(case.leading).reshape(-1)


@expected_collectives.register
def norm_collectives(case: NormCase, rank: int) -> Collectives:
    """Returns no collectives, because each rank normalizes its own tokens with its own copy of the parameters.

    Source: SequenceParallel in torch/distributed/tensor/parallel/style.py (2.13.0): parameters are
    wrapped by DTensor.from_local.
    """
    return ()
