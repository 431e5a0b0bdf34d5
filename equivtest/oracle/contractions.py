"""Bounds matrix products, on one rank or split over several ranks, their gradients, and reductions across ranks.

Letters: T tokens, K in_features, N out_features, w ranks; x (T, K), W (N, K), b (N,), cotangent G (T, N). S is the sum
of the magnitudes of the terms behind an element. P is the sum of the magnitudes of the ranks' partial sums.

Derived here.  A sum of K products, in any order, blocked or not, with or without fused
multiply-add, is off by gamma(K, u_a) S.  If the contraction is split over w ranks, each rank
stores its partial sum, which rounds once; these roundings add up to u_o P.  Then a collective adds
the w partial sums (`equivtest.oracle.rounding.after_additions`).  If the partition is unknown, S
replaces P, because P is at most S.  If every term of a sum is zero, nothing rounds or underflows.

A bias costs one rounding more: a kernel may store the product before it adds the bias.  DTensor
divides a replicated bias by w when it makes it partial, which rounds too.

Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., equations 3.5 and 3.13;
torch.distributed.tensor.placement_types, Partial._partition_value (torch 2.13.0).
"""

from __future__ import annotations

import torch

from equivtest.oracle.rounding import (
    Arithmetic,
    Bounded,
    Operand,
    after_additions,
    bounded,
    error_of,
    gamma,
    growth,
    store,
    value_of,
    where_finite,
)


def linear(
    x: Operand,
    weight: Operand,
    bias: Operand | None,
    arithmetic: Arithmetic,
    *,
    ranks: int = 1,
    partials: torch.Tensor | None = None,
) -> Bounded:
    """Computes y = x W^T + b. `product` describes the arguments."""
    return product(x, _transposed(weight), arithmetic, plus=bias, ranks=ranks, partials=partials, names="|x||W|")


def linear_grad_x(
    cotangent: Operand,
    weight: Operand,
    arithmetic: Arithmetic,
    *,
    ranks: int = 1,
    partials: torch.Tensor | None = None,
) -> Bounded:
    """Computes the gradient of x, cotangent (T, N) @ weight (N, K), which has the shape (T, K)."""
    return product(cotangent, weight, arithmetic, ranks=ranks, partials=partials, names="|G||W|")


def linear_grad_weight(cotangent: Operand, x: Operand, arithmetic: Arithmetic) -> Bounded:
    """Computes the gradient of the weight, cotangent^T (N, T) @ x (T, K), which has the shape (N, K)."""
    return product(_transposed(cotangent), x, arithmetic, names="|G||x|")


def linear_grad_bias(cotangent: Operand, arithmetic: Arithmetic) -> Bounded:
    """Computes the gradient of the bias, the sum of the cotangent (T, N) over tokens, which has the shape (N,)."""
    return total(cotangent, 0, arithmetic, names="|G|")


def product(
    left: Operand,
    right: Operand,
    arithmetic: Arithmetic,
    *,
    plus: Operand | None = None,
    ranks: int = 1,
    partials: torch.Tensor | None = None,
    names: str = "|left||right|",
) -> Bounded:
    """Computes left (R, K) @ right (K, C) + plus (C,), for any sizes R, K and C.

    Args:
        ranks: Number of ranks over which the contraction over K is split.
        partials: Sum over the ranks of |partial product|, in the shape (R, C). None if the partition is unknown.
    """
    a, b, e_a, e_b = value_of(left), value_of(right), error_of(left), error_of(right)
    num_terms = a.shape[-1] + (plus is not None)
    terms = (a.abs() + e_a) @ (b.abs() + e_b)  # S, including the operands' own errors
    brought = e_a @ b.abs() + (a.abs() + e_a) @ e_b
    present = ((a.abs() + e_a) != 0).double() @ ((b.abs() + e_b) != 0).double()  # terms that are not zero
    sums = _Sums(a @ b, terms, brought, num_terms, partials, present == 0)
    return _stored(sums, plus, arithmetic, ranks, names)


def total(
    terms: Operand,
    dim: int | tuple[int, ...],
    arithmetic: Arithmetic,
    *,
    ranks: int = 1,
    partials: torch.Tensor | None = None,
    names: str = "|terms|",
) -> Bounded:
    """Sums `terms` over one or more dims.

    Args:
        ranks: Number of ranks over which the sum is split.
        partials: Sum over the ranks of |partial sum|, in the shape of the result. None if the partition is unknown.
    """
    value, error = value_of(terms), error_of(terms)
    dims = (dim,) if isinstance(dim, int) else dim
    num_terms = 1
    for each in dims:
        num_terms *= value.shape[each]
    magnitude = (value.abs() + error).sum(dims)
    sums = _Sums(value.sum(dims), magnitude, error.sum(dims), num_terms, partials, magnitude == 0)
    return _stored(sums, None, arithmetic, ranks, names)


def all_reduce(operands: torch.Tensor, arithmetic: Arithmetic, *, average: bool = False) -> Bounded:
    """Computes the sum or average of all ranks' operands.

    For a reduce_scatter, this is the result before it is scattered.

    Derived here: each operand takes part in at most w - 1 additions.  For an average, a backend may
    divide the sum, or multiply the sum or each operand by 1 / w.  This rounds at most twice; if w is
    a power of two, it rounds only if it underflows.  The order of addition decides if the sum overflows.

    Args:
        operands: The operands of all w ranks, stacked along the first dim, in the tensors' own dtype or a wider dtype.
    """
    values = operands.to(torch.float64)
    w = len(values)
    terms = values.abs().sum(0)
    is_power_of_two = w & (w - 1) == 0
    roundings = (w - 1, arithmetic.u_r), (0 if is_power_of_two or not average else 2, arithmetic.u_o)
    divisor = w if average else 1
    underflows = (w + 1) * arithmetic.eta if average else 0.0
    error = growth(*roundings) * terms / divisor + underflows + (w - 1) * arithmetic.eta_r / divisor
    error = where_finite(terms, arithmetic.largest, error)
    also = " and 2 of the division" if average and not is_power_of_two else ""
    derivation = f"{w - 1} additions of {arithmetic.reduce}{also}, on the sum of the ranks' magnitudes"
    return bounded(values.sum(0) / divisor, error, terms / divisor, w + 1, derivation)


class _Sums:
    """Exact sums before they are stored, and the numbers on which the error of the sums depends.

    All tensors are float64 and have one shape.

    Attributes:
        value: The exact sums.
        magnitude: S, the sum of the magnitudes of the terms.
        brought: The part of the error that comes from the operands' own errors.
        num_terms: Number of times that an accumulator rounds a term.
        partials: P, the sum of the magnitudes of the ranks' partial sums. If the partition is unknown, this is S.
        is_zero: Mask of sums whose terms are all zero.
    """

    def __init__(
        self,
        value: torch.Tensor,
        magnitude: torch.Tensor,
        brought: torch.Tensor,
        num_terms: int,
        partials: torch.Tensor | None,
        is_zero: torch.Tensor,
    ) -> None:
        self.value, self.magnitude, self.brought, self.num_terms = value, magnitude, brought, num_terms
        self.is_zero = is_zero
        self.partials = magnitude if partials is None else partials + brought


def _stored(sums: _Sums, plus: Operand | None, arithmetic: Arithmetic, ranks: int, names: str) -> Bounded:
    zeros = torch.zeros_like(sums.value)
    bias = zeros if plus is None else zeros + value_of(plus)
    e_bias = zeros if plus is None else zeros + error_of(plus)
    magnitude = sums.magnitude + bias.abs() + e_bias
    error = sums.brought + e_bias + gamma(sums.num_terms, arithmetic.u_a) * magnitude
    error = error + sums.num_terms * arithmetic.eta_a
    value = sums.value + bias
    if ranks == 1:
        if plus is not None:  # the product may be stored before the bias is added
            error = store(sums.value, error, arithmetic)
        error = store(value, error, arithmetic)
        stored = f"{1 + (plus is not None)} rounding{'s' * (plus is not None)} of {arithmetic.dtype}"
    else:
        error = _reduced(sums, bias.abs() + e_bias, error, arithmetic, ranks, has_bias=plus is not None)
        num_stored = 1 + 2 * (plus is not None)
        stored = f"{num_stored} of {arithmetic.dtype} and {ranks - 1} of {arithmetic.reduce} on {ranks} ranks' sums"
    error = where_finite(magnitude + error, arithmetic.largest_a, error)
    error = torch.where(sums.is_zero & (bias.abs() + e_bias == 0), 0.0, error)
    derivation = f"gamma({sums.num_terms} roundings of {arithmetic.accumulate}) {names} + {stored}"
    return bounded(value, error, magnitude, sums.num_terms, derivation)


def _reduced(
    sums: _Sums, bias: torch.Tensor, error: torch.Tensor, arithmetic: Arithmetic, ranks: int, *, has_bias: bool
) -> torch.Tensor:
    """Bounds the error of sums after each rank stored its part of a sum and a collective added the parts.

    A rank's part is a partial product and a share of the bias. The product is stored once. If a bias is added, the sum
    is stored too. The bias is divided by the number of ranks, and the quotient is stored.

    Args:
        bias: |bias| plus its error. If `has_bias` is False, all elements are 0.
        error: Error of the sums before they are stored.
    """
    stored = error + growth((1 + has_bias, arithmetic.u_o)) * (sums.partials + error)
    stored = stored + growth((2, arithmetic.u_o)) * bias + ranks * (1 + 2 * has_bias) * arithmetic.eta
    stored = stored + (ranks - 1) * arithmetic.eta_r
    found = after_additions(sums.value, sums.partials, stored, ranks - 1, arithmetic.u_r, beside=bias)
    return where_finite(sums.partials + bias + found, arithmetic.largest, found)


def _transposed(matrix: Operand) -> Operand:
    if isinstance(matrix, Bounded):
        return Bounded(matrix.value.T, matrix.allowed.T, matrix.derivation)
    return matrix.T
