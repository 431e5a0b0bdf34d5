"""Computes one linear layer, forward and backward, in integers.

Letters: T tokens, K in_features, N out_features. y = x W^T + b with x (T, K), W (N, K), b (N,); for a cotangent G (T,
N): grad.x = G W, grad.weight = G^T x, grad.bias = the sum of G over tokens.

Source: torch.nn.Linear (2.13.0) for the formula; its gradients are derived here, by the chain
rule.  Exactness: see `equivtest.oracle.exact`.
"""

from __future__ import annotations

import torch

from equivtest.cases.values import draw
from equivtest.families.linear.case import REAL_MODES, LinearCase
from equivtest.families.linear.oracle.real import expect_real_linear
from equivtest.families.linear.oracle.unsharded import unsharded_bits
from equivtest.oracle import expect
from equivtest.oracle.exact import (
    Scaled,
    Sum,
    bits_of,
    find_integers,
    largest_of,
    significand_bits,
    sum_products,
    sum_terms,
)
from equivtest.oracle.expected import Expected, ExpectedTensor
from equivtest.tensors import DTYPES


@expect.register
def expect_linear(case: LinearCase, index: int) -> Expected:
    """Returns the answers of the unsharded layer. If the draw's values are real numbers, the answers have bounds."""
    if case.values[index][0] in REAL_MODES:
        return expect_real_linear(case, index)
    given = draw(case, index)
    shapes, layouts, flags = case.shapes(), case.layouts(), case.given_flags()
    bits = significand_bits(DTYPES[case.dtype])
    own_bits = unsharded_bits(case, index, given)
    tensors, bits_used = {}, {}
    for name, found in sum_linear(case, given).items():
        tensors[name] = ExpectedTensor(
            value=found.value.reshape(shapes[name]),
            allowed=None,
            layout=layouts[name],
            dtype=case.dtype,
            derivation=f"equal: integers times a power of two, at most {found.bits_used} of {bits} bits",
            requires_grad=bool(case.requires_grad) if name == "output" else flags.get(name.removeprefix("param.")),
            bits=own_bits.get(name),
            is_sum=not name.startswith("param."),
        )
        bits_used[name] = found.bits_used
    return Expected(tensors, bits_used)


def sum_linear(case: LinearCase, given: dict[str, torch.Tensor]) -> dict[str, Sum]:
    """Returns the exact value of every answer by name. Leading dims are flattened."""
    dtype = DTYPES[case.dtype]
    x = find_integers("x", given["x"].reshape(-1, case.in_features))  # (T, K)
    weight = find_integers("weight", given["weight"])  # (N, K)
    bias = find_integers("bias", given["bias"]) if case.bias else None  # (N,)
    cotangent = find_integers("cotangent", given["cotangent"].reshape(-1, case.out_features))  # (T, N)

    answers = {"output": sum_products("output", x, _transposed(weight), dtype, plus=bias, divided_by=case.world_size)}
    for name, integers in (("weight", weight), ("bias", bias)):
        if integers is not None:
            answers[f"param.{name}"] = Sum(given[name].to(torch.float64), bits_of(largest_of(integers.integers)))
    if "x" in case.requires_grad:
        answers["grad.x"] = sum_products("grad.x", cotangent, weight, dtype)
    if "weight" in case.requires_grad:
        answers["grad.weight"] = sum_products("grad.weight", _transposed(cotangent), x, dtype)
    if "bias" in case.requires_grad:
        answers["grad.bias"] = sum_terms("grad.bias", cotangent, dtype)
    return answers


def _transposed(matrix: Scaled) -> Scaled:
    return Scaled(matrix.integers.T, matrix.exponent)
