"""Bounds gradients that data parallelism sums over micro-batches and averages over ranks.

Letters: R rows of the whole batch, w ranks, M micro-batches; left (C, R) @ right (R, D) / w, in
which C and D are any sizes.

The result is exact if two conditions hold. First, the operands are integers (`equivtest.oracle.exact`). Second, in each
row of the batch, all elements of `left` or all elements of `right` are multiples of w's odd part. Then every sum of
terms is a multiple of w's odd part too, so a program may divide the sum before or after a collective reduces it. A
program may also multiply by fl(1/w), which has a relative error d, instead of dividing by w. This changes a quotient k
to k (1 + d), which is rounded to k if |d| <= u/2. In float32, w = 7 is the first number that breaks this condition.

Otherwise the result has a bound, derived here. Each of the w M micro-batches' products is stored, and divided by w. If
w is not a power of two, the division rounds twice: the reciprocal of w is rounded, and so is the product with the
reciprocal. Then one of two orders of addition follows. In the first order, each rank adds its M products, and a
collective adds the w sums. In the second order, a collective adds the w products of each micro-batch, and each rank
adds the M sums. The bound of additions is `equivtest.oracle.rounding.after_additions`; the result has the wider bound
of the two orders. In both orders, groups of ranks may add their products of each micro-batch first. If every term of a
sum is zero, the sum is zero.

If gradients are stored in one dtype and reduced in another dtype, each stored product is cast to the dtype of the
reduction. The cast rounds once, and all later operations round in the dtype of the reduction. Exact sums must then fit
the dtype of storage for each micro-batch, and the dtype of the reduction for the whole batch.

Source: Reducer::mark_variable_ready_dense in torch/csrc/distributed/c10d/reducer.cpp for the
reciprocal; _get_gradient_divide_factors in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py,
which divides by a power of two before and by the rest after (2.13.0); Higham, Accuracy and
Stability of Numerical Algorithms, 2nd ed., equation 3.5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.exact import InexactData, Sum, find_integers, sum_products
from equivtest.oracle.operations import Found, Operations
from equivtest.oracle.rounding import (
    Arithmetic,
    Bounded,
    after_additions,
    bounded,
    gamma,
    growth,
    unit_roundoff,
    where_finite,
)
from equivtest.tensors import DTYPES

AVERAGING_ROUNDINGS = 2
"""Number of roundings of a division by the number of ranks: its reciprocal, and the product with that."""


@dataclass(frozen=True)
class Averages:
    """Computes the parameters' gradients of one step, averaged over the ranks.

    Each gradient is a sum over micro-batches.

    Attributes:
        reduced: Name of the dtype in which stored products are added and divided. If '', this is the dtype of
            `operations`.
        scattered: Number of ranks in each group of ranks that adds the group's products of each micro-batch first.
        scalings: Number of roundings in a program that scales a gradient by several factors, whose product is 1 /
            ranks. If None, the program divides the gradient once.
    """

    operations: Operations
    ranks: int
    micro_batches: int
    reduced: str = ""
    scattered: int = 1
    scalings: int | None = None

    @property
    def num_scalings(self) -> int:
        """Number of roundings in the scaling of a gradient by 1 / ranks.

        If `scalings` is None and `ranks` is a power of two, the number is 0, because the scaling then rounds only if
        its result underflows.
        """
        if self.scalings is not None:
            return self.scalings
        return AVERAGING_ROUNDINGS if self.ranks & (self.ranks - 1) else 0

    def product(self, left: torch.Tensor, right: torch.Tensor) -> Found:
        """Returns left (C, R) @ right (R, D) / ranks.

        Both operands are global float64 tensors, whose R rows have the order of the batch.
        """
        operations = self.operations
        if not reciprocal_is_near(self.ranks, operations.arithmetic.accumulate):
            operations = replace(operations, must_be_exact=False, may_be_exact=False)
        return operations.choose(lambda: self._exactly(left, right), lambda: self._bounded(left, right))

    def total(self, terms: torch.Tensor) -> Found:
        """Returns the sum of `terms` (R, C) over the R rows, divided by the number of ranks, in the shape (C,)."""
        found = self.product(terms.T, torch.ones((len(terms), 1), dtype=torch.float64))
        allowed = None if found.allowed is None else found.allowed[:, 0]
        return replace(found, value=found.value[:, 0], allowed=allowed)

    def _exactly(self, left: torch.Tensor, right: torch.Tensor) -> Sum:
        factors = find_integers("left", left), find_integers("right", right)
        odd = self.ranks // (self.ranks & -self.ranks)
        in_left, in_right = (side.integers % odd == 0 for side in factors)
        if not bool((in_left.all(0) | in_right.all(1)).all()):
            raise InexactData(f"gradients are no multiples of {odd}, so their average over ranks is rounded")
        dtype = self.operations.dtype
        total = sum_products("average", *factors, DTYPES[self.reduced or dtype])
        if self.reduced not in ("", dtype):
            for block in self._blocks(len(right)):
                own = find_integers("left", left[:, block]), find_integers("right", right[block])
                sum_products("gradient of a micro-batch", *own, DTYPES[dtype])
        return Sum(total.value / self.ranks, total.bits_used)

    def _blocks(self, num_rows: int) -> list[slice]:
        num_stored = self.ranks * self.micro_batches
        size = num_rows // num_stored
        return [slice(size * block, size * (block + 1)) for block in range(num_stored)]

    def _bounded(self, left: torch.Tensor, right: torch.Tensor) -> Bounded:
        w, num_rows, arithmetic = self.ranks, len(right), self.operations.arithmetic
        after = arithmetic_of(self.reduced) if self.reduced else arithmetic
        products = [left[:, block] @ right[block] for block in self._blocks(num_rows)]
        blocks = torch.stack(products).view(w, self.micro_batches, *products[0].shape)  # (w, M, C, D)
        num_stored, size = len(products), num_rows // len(products)
        terms = left.abs() @ right.abs()
        error = gamma(size, arithmetic.u_a) * terms + num_rows * arithmetic.eta_a
        num_casts = int(after.dtype != arithmetic.dtype)
        num_more = num_casts + self.num_scalings
        grown, eta = growth((1, arithmetic.u_o), (num_more, after.u_o)), max(arithmetic.eta, after.eta)
        error = error + grown * (blocks.abs().sum((0, 1)) + error)
        num_underflows = (1 + num_casts + w * max(self.num_scalings, 1)) * num_stored  # divided before it is added
        error = error + num_underflows * eta * (1 + grown)
        error = error + (num_stored - 1) * after.eta_r
        error = self._added(blocks, error, after)
        error = where_finite(terms + error, min(arithmetic.largest, after.largest), error) / w
        error = torch.where((left != 0).double() @ (right != 0).double() == 0, 0.0, error)
        derivation = (
            f"(gamma({size} roundings of {arithmetic.accumulate}) |left||right| + 1 of {arithmetic.dtype} and "
            f"{num_more} of {after.dtype} on {num_stored} micro-batches' sums + {num_stored - w} additions of "
            f"{after.dtype} and {w - 1} of {after.reduce}, or on each micro-batch) / {w}"
        )
        return bounded(left @ right / w, error, terms / w, num_rows + 1, derivation)

    def _added(self, blocks: torch.Tensor, error: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
        """Bounds the error of the sum of the stored products `blocks` (w, M, C, D). The bound has the shape (C, D).

        Args:
            error: Sum of the errors that the products had before they were added, in the shape (C, D).
        """
        in_a_group = (1, self.scattered - 1, arithmetic.u_r)
        on_a_rank = (2, self.micro_batches - 1, arithmetic.u_o)
        across_groups = (0, self.ranks // self.scattered - 1, arithmetic.u_r)
        grouped, errors = blocks.view(-1, self.scattered, *blocks.shape[1:]), []
        for order in ((in_a_group, on_a_rank, across_groups), (in_a_group, across_groups, on_a_rank)):
            reached, terms = error, grouped
            for dim, num_additions, u in order:
                sums = terms.sum(dim, keepdim=True)
                between, magnitude = (each.abs().sum((0, 1, 2)) for each in (sums, terms))
                reached, terms = after_additions(between, magnitude, reached, num_additions, u), sums
            errors.append(reached)
        return torch.maximum(*errors)


def reciprocal_is_near(ranks: int, dtype: str) -> bool:
    """True if 1 / ranks, rounded to the dtype, has a relative error of at most half a unit roundoff."""
    reciprocal = torch.tensor(1.0, dtype=DTYPES[dtype]) / ranks
    error = abs(Fraction(float(reciprocal)) * ranks - 1)
    return 2 * error <= Fraction(unit_roundoff(dtype))
