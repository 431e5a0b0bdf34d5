"""Computes one embedding, forward and backward: copied rows of the weight, and sums of rows of the cotangent.

Letters: T tokens, V num_embeddings, D embedding_dim, n_v how often id v occurs; G (T, D) the cotangent. Row v of the
gradient is the sum of G_t over the tokens t whose id is v. The row of `padding_idx` is zero. If the gradient is scaled
by frequency, row v is divided by n_v.

The forward only copies rows, so real values are equal too, to the last bit. The exception is a rowwise embedding. Its
all_reduce adds zeros, and a backend may then flush subnormals.

The gradient is derived here. A sum of n_v numbers has n_v - 1 additions, in any order and divided among ranks in any
way, because adding zeros rounds nothing. `equivtest.oracle.rounding.after_additions` bounds the error of additions. A
sum may be kept in the storage dtype. Each addition is then rounded to that dtype, and before that to the accumulator's
dtype if the accumulator is wider. If a gradient is scaled by 1 / n_v, this factor and each product are rounded, and the
first product is stored before the additions. If n_v is a power of two, the factor and the products do not round.

Source: torch.nn.Embedding and embedding_dense_backward_cpu in ATen/native/Embedding.cpp (2.13.0), which adds row by row
into the gradient; Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2.  Exactness:
`equivtest.oracle.exact`.
"""

from __future__ import annotations

import torch

from equivtest.cases.values import draw
from equivtest.families.embedding.case import REAL_MODE, EmbeddingCase
from equivtest.oracle import expect
from equivtest.oracle.declared import arithmetic_of, smallest_kept
from equivtest.oracle.exact import Scaled, find_integers, significand_bits, sum_products
from equivtest.oracle.expected import COPIED, Expected, ExpectedTensor
from equivtest.oracle.rounding import U_REFERENCE, Arithmetic, Bounded, after_additions, bounded, growth, where_finite
from equivtest.tensors import DTYPES


@expect.register
def expect_embedding(case: EmbeddingCase, index: int) -> Expected:
    given = draw(case, index)
    ids, weight = given["ids"].long(), given["weight"]
    needs_grad = bool(case.requires_grad)
    tensors = {
        "output": _copied(case, "output", weight[ids], requires_grad=needs_grad),
        "param.weight": _copied(case, "param.weight", weight, requires_grad=needs_grad),
    }
    bits_used: dict[str, int] = {}
    if not needs_grad:
        return Expected(tensors, bits_used)
    cotangent = given["cotangent"].reshape(-1, case.embedding_dim)  # (T, D)
    if case.values[index][0] == REAL_MODE or case.scale_grad_by_freq:
        found = bound_gradient(case, ids.reshape(-1), cotangent, arithmetic_of(case.dtype))
    else:
        found, bits_used["grad.weight"] = sum_gradient(case, ids.reshape(-1), cotangent)
    tensors["grad.weight"] = ExpectedTensor(
        value=found.value,
        allowed=None if bits_used else found.allowed,
        layout=case.layouts()["grad.weight"],
        dtype=case.dtype,
        derivation=found.derivation,
    )
    return Expected(tensors, bits_used)


def sum_gradient(case: EmbeddingCase, ids: torch.Tensor, cotangent: torch.Tensor) -> tuple[Bounded, int]:
    """Returns (exact gradient of the weight, bits of the largest sum of magnitudes over the tokens of one id)."""
    dtype = DTYPES[case.dtype]
    chosen = Scaled(_selection(case, ids).to(torch.int64), 0)
    found = sum_products("grad.weight", chosen, find_integers("cotangent", cotangent), dtype)
    why = f"equal: integers times a power of two, at most {found.bits_used} of {significand_bits(dtype)} bits"
    return Bounded(found.value, torch.zeros_like(found.value), why), found.bits_used


def bound_gradient(case: EmbeddingCase, ids: torch.Tensor, cotangent: torch.Tensor, arithmetic: Arithmetic) -> Bounded:
    """Returns the gradient of the weight with its bound.

    If no token has a row's id, the row must be exactly zero. If one token has the row's id, the row must be an exact
    copy.
    """
    chosen = _selection(case, ids)
    counts = chosen.sum(1)  # (V,)
    divisors = counts.clamp(min=1) if case.scale_grad_by_freq else torch.ones_like(counts)
    value = chosen @ cotangent.double() / divisors[:, None]
    magnitude = chosen @ cotangent.double().abs() / divisors[:, None]
    terms = chosen @ (cotangent != 0).double()  # (V, D), that are not zero
    rounds = torch.tensor([may_round(int(divisor)) for divisor in divisors])[:, None]
    error = rounds * (_of_factor(arithmetic) * magnitude + counts[:, None] * (arithmetic.eta + arithmetic.eta_a))
    error = error + counts[:, None] * arithmetic.eta_r
    error = _after_each(value, magnitude, error, (terms - 1).clamp(min=0), arithmetic)
    error = where_finite(magnitude + error, arithmetic.largest, error)
    most = int(counts.max())
    scaled = ", each scaled by a rounded 1 / n" if case.scale_grad_by_freq else ""
    found = bounded(
        value, error, magnitude, most, f"n - 1 additions of {case.dtype} for an id n times{scaled}; n <= {most}"
    )
    exact = (counts <= 1)[:, None]
    return Bounded(found.value, torch.where(exact, 0.0, found.allowed), found.derivation)


def _of_factor(arithmetic: Arithmetic) -> float:
    """Returns the relative error of three roundings: of 1 / n, of a product with 1 / n, and of the stored product."""
    if arithmetic.accumulate == arithmetic.dtype:
        return growth((2, arithmetic.u_o), (1, U_REFERENCE))
    return growth((2, arithmetic.u_a), (1, arithmetic.u_o), (1, U_REFERENCE))


def _after_each(
    value: torch.Tensor, magnitude: torch.Tensor, error: torch.Tensor, additions: torch.Tensor, arithmetic: Arithmetic
) -> torch.Tensor:
    """Returns the error of sums, like `after_additions`, but with a number of additions for each element."""
    u = growth((1, arithmetic.u_o), (1, arithmetic.u_a if arithmetic.accumulate != arithmetic.dtype else 0.0))
    found = torch.zeros_like(value)
    for num in set(additions.flatten().tolist()):
        found = torch.where(additions == num, after_additions(value, magnitude, error, int(num), u), found)
    return found


def may_round(divisor: int) -> bool:
    return divisor & (divisor - 1) != 0


def _selection(case: EmbeddingCase, ids: torch.Tensor) -> torch.Tensor:
    """Returns a float64 matrix (V, T): 1 if the token has the id of the row. The row of `padding_idx` is zero."""
    chosen = ids[None, :] == torch.arange(case.num_embeddings)[:, None]
    return (chosen & (ids != case.padding_idx)[None, :]).to(torch.float64)


def _copied(case: EmbeddingCase, name: str, value: torch.Tensor, *, requires_grad: bool) -> ExpectedTensor:
    return ExpectedTensor(
        value=value.to(torch.float64),
        allowed=None,
        layout=case.layouts()[name],
        dtype=case.dtype,
        derivation=COPIED,
        requires_grad=requires_grad,
        bits=value,
        flushed_below=smallest_kept(case.dtype) if name == "output" and case.style == "rowwise" else 0.0,
    )
