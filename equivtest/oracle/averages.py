"""Gradients that data parallelism sums over micro-batches and averages over ranks.

Letters: R rows of the whole batch, w ranks, M micro-batches; left (C, R) @ right (R, D) / w.

Exact where the operands are integers (`equivtest.oracle.exact`) and, of each row of the batch, those of
`left` or those of `right` multiples of w's odd part: then so is every sum of terms, which may be divided
before or after it is reduced.  A division may be a multiplication by fl(1/w), which is within a relative
error d of 1/w; a quotient k comes out as k wherever |d| <= u/2, since k (1 + d) is then nearest to k.  In
float32 that fails first at w = 7.

Else: each of the w M micro-batches is stored, added to those before it, divided and reduced, so
that a stored product takes part in 1 + (M - 1) + 2 roundings of storage (the reciprocal and the
product) and w - 1 of reduction.

Where gradients are reduced in another dtype than they are stored in, a stored product is cast to that,
which is one rounding more, and all that follows rounds there.  Exact sums must then fit the first dtype
per micro-batch and the second altogether.

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
from equivtest.oracle.rounding import Bounded, bounded, gamma, growth, unit_roundoff, where_finite
from equivtest.tensors import DTYPES

AVERAGING_ROUNDINGS = 2
"""Of the reciprocal of w, and of the product with it."""


@dataclass(frozen=True)
class Averages:
    """Averages of one step's gradients, `operations` saying in which dtype and how exact.

    Attributes:
        ranks: w.
        micro_batches: M.
        reduced: Name of the dtype in which stored products are added and divided; '': that of `operations`.
        more_scalings: Roundings of scaling beyond those of the division by w.
    """

    operations: Operations
    ranks: int
    micro_batches: int
    reduced: str = ""
    more_scalings: int = 0

    def product(self, left: torch.Tensor, right: torch.Tensor) -> Found:
        """left (C, R) @ right (R, D) / w; float64, global, rows in the order of the batch."""
        operations = self.operations
        if not reciprocal_is_near(self.ranks, operations.arithmetic.accumulate):
            operations = replace(operations, must_be_exact=False, may_be_exact=False)
        return operations.choose(lambda: self._exactly(left, right), lambda: self._bounded(left, right))

    def total(self, terms: torch.Tensor) -> Found:
        """The sum over rows of terms (R, C), divided by w: (C,)."""
        found = self.product(terms.T, torch.ones((len(terms), 1), dtype=torch.float64))
        allowed = None if found.allowed is None else found.allowed[:, 0]
        return replace(found, value=found.value[:, 0], allowed=allowed)

    def _exactly(self, left: torch.Tensor, right: torch.Tensor) -> Sum:
        factors = find_integers("left", left), find_integers("right", right)
        odd = self.ranks // (self.ranks & -self.ranks)
        in_left, in_right = (side.integers % odd == 0 for side in factors)
        if not bool((in_left.all(0) | in_right.all(1)).all()):
            raise InexactData(f"gradients are no multiples of {odd}, so that their average over ranks is rounded")
        dtype = self.operations.dtype
        found = sum_products("average", *factors, DTYPES[self.reduced or dtype])
        if self.reduced not in ("", dtype):
            for block in self._blocks(len(right)):
                own = find_integers("left", left[:, block]), find_integers("right", right[block])
                sum_products("gradient of a micro-batch", *own, DTYPES[dtype])
        return Sum(found.value / self.ranks, found.bits_used)

    def _blocks(self, num_rows: int) -> list[slice]:
        """The rows behind each stored product."""
        num_stored = self.ranks * self.micro_batches
        size = num_rows // num_stored
        return [slice(size * block, size * (block + 1)) for block in range(num_stored)]

    def _bounded(self, left: torch.Tensor, right: torch.Tensor) -> Bounded:
        w, num_rows, arithmetic = self.ranks, len(right), self.operations.arithmetic
        after = arithmetic_of(self.reduced) if self.reduced else arithmetic
        blocks = self._blocks(num_rows)
        num_stored, size = len(blocks), num_rows // len(blocks)
        stored = torch.stack([(left[:, block] @ right[block]).abs() for block in blocks]).sum(0)
        terms = left.abs() @ right.abs()
        error = gamma(size, arithmetic.u_a) * terms + num_rows * arithmetic.eta_a
        num_casts = int(after.dtype != arithmetic.dtype)
        of_sums = num_casts + (self.micro_batches - 1) + (AVERAGING_ROUNDINGS if w > 1 else 0) + self.more_scalings
        grown = growth((1, arithmetic.u_o), (of_sums, after.u_o), (w - 1, after.u_r))
        eta = max(arithmetic.eta, after.eta)
        error = error + grown * (stored + error) + (2 + num_casts + self.more_scalings) * num_stored * eta * (1 + grown)
        error = where_finite(terms + error, min(arithmetic.largest, after.largest), error)
        error = error / w + eta
        derivation = (
            f"(gamma({size} roundings of {arithmetic.accumulate}) |left||right| + 1 of {arithmetic.dtype}, {of_sums} "
            f"of {after.dtype} and {w - 1} of {after.reduce} on {num_stored} micro-batches' sums) / {w}"
        )
        return bounded(left @ right / w, error, terms / w, num_rows + 1, derivation)


def reciprocal_is_near(ranks: int, dtype: str) -> bool:
    """Whether fl(1 / ranks) is within half a unit roundoff of 1 / ranks, relative."""
    reciprocal = torch.tensor(1.0, dtype=DTYPES[dtype]) / ranks
    error = abs(Fraction(float(reciprocal)) * ranks - 1)
    return 2 * error <= Fraction(unit_roundoff(dtype))
