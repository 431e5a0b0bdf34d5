"""Bounds how far one operation moves two correct programs apart: see `equivtest.oracle.running_rules`.

Two programs round: the unsharded module and the parallel program. Each program computes in `Arithmetic.accumulate`, in
which a sum of n terms in any order has n roundings, plus SPARE. Each program stores the result once, in the tensor's
dtype. This is no additional rounding if the program computes in the tensor's dtype. If each rank of the parallel
program holds a share of a result, the rank stores this share. The magnitudes of the stored shares add up to no more
than the magnitude of the result. A collective adds the shares, and rounds every sum of some shares to `reduce`.

Derived here.  A sum of some shares, or of some of their terms, is at most the sum of all positive or of all negative
terms, (m + |v|) / 2 with m the sum of magnitudes (`equivtest.oracle.rounding.after_additions`).

Source: at::opmath_type and at::acc_type of torch 2.13.0, in which 16-bit kernels compute; the products,
sums and curves of `equivtest.oracle.running_rules` are measured by `python -m studies.bounded_ops`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from equivtest.oracle.declared import declared_of
from equivtest.oracle.exact import InexactData
from equivtest.oracle.ranged import Parts
from equivtest.oracle.rounding import Arithmetic, underflow, unit_roundoff, where_finite
from equivtest.tensors import dtype_name

SPARE = 3  # roundings of a result in addition to its sum: a kernel may reorder factors, and divide by a number

Count = int | torch.Tensor
"""Number of roundings: one number for all elements, or one for each element."""


@dataclass(frozen=True)
class Roundings:
    """Bounds the roundings that an operation adds, in the unsharded module and in a program on `ranks` ranks.

    Attributes:
        arithmetic: Arithmetic of the dtype in which the module is judged.
        ranks: Number of ranks; each stores its share of a sum, and a collective adds the shares.
        coarse: Set while torch's decomposition stands in for an unknown kernel, because the kernel may compute and
            store in fewer bits than the decomposition. Then `coarse` is the arithmetic of all operations whose dtype
            has at least as many bits as `coarse.dtype`. If None, the dtype of an operation determines its arithmetic.
    """

    arithmetic: Arithmetic
    ranks: int
    coarse: Arithmetic | None = None

    @property
    def of_curve(self) -> int:
        """Error of exp, erf and similar functions, as a number of roundings. An ulp is at most two roundings."""
        return 2 * math.ceil(self.arithmetic.libm_ulp)

    @property
    def words(self) -> str:
        record = self.arithmetic
        return f"computed in {record.accumulate}, stored in {record.dtype}, added up in {record.reduce}"

    def record(self, dtype: torch.dtype) -> Arithmetic:
        """Returns the arithmetic of operations whose results have the dtype `dtype`.

        This dtype need not be the module's dtype. If the backend declares nothing for the dtype, the operations
        compute, store and add in the dtype.

        Raises:
            InexactData: the dtype has only whole numbers.
        """
        if not dtype.is_floating_point:
            raise InexactData(f"no bound is known for a sum in {str(dtype).removeprefix('torch.')} of inexact values")
        name, own = dtype_name(dtype), self.arithmetic
        if self.coarse is not None and unit_roundoff(name) <= self.coarse.u_o:
            return self.coarse
        if name == own.dtype:
            return own
        return declared_of(name) or replace(own, dtype=name, accumulate=name, reduce=name)

    def where_unknown(self, dtype: torch.dtype) -> Roundings:
        """Returns the roundings of an unknown kernel. It may add in `dtype` and store every intermediate result."""
        return replace(self, coarse=replace(self.record(dtype), accumulate=dtype_name(dtype)))

    def own(
        self,
        parts: Parts,
        num: Count = 0,
        *,
        stores: Count = 1,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Bounds the sum of two errors: an operation's roundings in the unsharded module, and in the parallel program.

        Args:
            parts: The result, with the error that its operands bring.
            num: Number of roundings in the dtype `accumulate`. The bound counts SPARE additional roundings.
            stores: Number of times that a value is stored in the tensor's own dtype: more than 1 for a sum that is
                computed in that dtype.
            added: Bound on the sum of the shares of any of the ranks, if a collective adds shares in this operation.
                None if no collective adds shares.
        """
        record, error = self.record(parts.value.dtype), parts.error
        count = num + SPARE
        bound = 2 * gamma_of(count, record.u_a) * parts.magnitude
        lost = 2 * count * record.eta_a
        further = stores - int(record.accumulate == record.dtype)  # one store is among the roundings of the computation
        share = self._held(parts, stores)
        unsharded = parts.size if isinstance(stores, int) and stores == 1 else parts.magnitude
        bound = bound + gamma_of(further, record.u_o) * (share + error + unsharded)
        lost = lost + (self.ranks + 1) * further * record.eta
        if added is not None:
            bound = bound + self._added_up(record, parts, added, error + bound)
            lost = lost + self.ranks * (record.eta_r + underflow(record.reduce))
        return torch.where(parts.magnitude == 0, 0.0, bound + lost)

    def divided(self, parts: Parts) -> torch.Tensor:
        """Bounds the roundings of a program in which each rank divides a result by the number of ranks.

        All ranks hold the whole result.
        """
        record = self.record(parts.value.dtype) if parts.value.is_floating_point() else self.arithmetic
        found = (record.u_o * parts.reach + self.ranks * record.eta) * int(self.ranks > 1)
        return torch.where(parts.magnitude == 0, 0.0, found)

    def stored(
        self, parts: Parts, dtype: torch.dtype, stores: Count, *, is_sum: bool = False, one_by_one: bool = False
    ) -> Parts:
        """Rounds a wider result to `dtype`, and adds the roundings of both programs' stores to its error.

        The unsharded module stores the result once.  With `one_by_one`, each stored sum is at most the sum of all
        positive or of all negative terms.  If the ranks divide the terms, they also divide the stores, so their stored
        sums together are no larger than those of one rank that adds all terms.

        Args:
            stores: Number of times that a parallel program stores a term, or a sum that contains it.
            is_sum: True if a collective may add the ranks' shares of the result.
            one_by_one: True if a program adds one term more before each store.
        """
        record, value = self.record(dtype), parts.value.to(dtype)
        off = torch.where(value == parts.value, 0.0, (value.double() - parts.value.double()).abs())
        error = parts.error + off.nan_to_num(nan=0.0)
        most = partial_sums(parts.value, parts.magnitude)
        error = error + gamma_of(stores, record.u_o) * (
            (most if one_by_one else self._held(parts, stores)) + 1.5 * error
        )
        error = error + stores * self.ranks * record.eta * (parts.magnitude != 0)
        if is_sum:
            error = error + self._added_up(record, parts, most, error)
        magnitude = torch.maximum(parts.magnitude, value.double().abs()) + error
        allowed = where_finite(magnitude, record.largest, error)
        return Parts(value, torch.where(parts.value.isinf() & (parts.error == 0), 0.0, allowed), magnitude)

    def _added_up(self, record: Arithmetic, parts: Parts, most: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        """Bounds the roundings of a collective that adds the ranks' shares of a result.

        Args:
            most: Bound on each partial sum except the last, which is the result itself.
            error: Error of the shares before they are added.
        """
        if self.ranks == 1:
            return torch.zeros_like(error)
        earlier = gamma_of(self.ranks - 2, record.u_r) * (most + 1.5 * error)
        return earlier + record.u_r * (parts.size + error + earlier)

    def _held(self, parts: Parts, stores: Count) -> torch.Tensor:
        """Bounds the sum, over all ranks, of the magnitudes of the stored numbers.

        On one rank that stores once, only the result is stored, so the bound is |value| + error. Otherwise shares of
        the result may be stored, so the bound is `parts.magnitude`.
        """
        is_whole = self.ranks == 1 and isinstance(stores, int) and stores == 1
        return parts.reach if is_whole else parts.magnitude

    def averaged(self, parts: Parts) -> torch.Tensor:
        """Bounds the roundings of an average over the ranks. Each rank has a share of the result, or all of it.

        A program may divide the shares, or their sum, or both. Division by a power of two is exact. Division by any
        other number rounds twice, like a product with a reciprocal. The addition of shares was counted before. If each
        rank holds the whole result, the bound includes the addition of the ranks' copies. On two ranks this addition
        rounds nothing.
        """
        record, reach = self.record(parts.value.dtype), parts.reach
        divisions = 0 if self.ranks & (self.ranks - 1) == 0 else 2
        additions = self.ranks - 1 if self.ranks > 2 else 0
        bound = gamma_of(divisions, record.u_o) * (parts.magnitude + reach)
        bound = bound + gamma_of(additions, record.u_r) * (1 + gamma_of(divisions, record.u_o)) * reach
        return torch.where(parts.magnitude == 0, 0.0, bound + 2 * (self.ranks - 1) * (record.eta + record.eta_r))

    def one_by_one(self, parts: Parts, num: int) -> torch.Tensor:
        """Bounds the roundings of a program that adds `num` results in any order, and stores each sum.

        Each rank may first add its shares, and a collective may then add the ranks' sums. A collective may instead
        first add the shares of each result. In both orders a share takes part in num - 1 additions on a rank and ranks
        - 1 additions of a collective.
        """
        record = self.record(parts.value.dtype)
        count = num - 1 + self.ranks - 1
        bound = gamma_of(count, max(record.u_o, record.u_r)) * (parts.magnitude + parts.error)
        return torch.where(parts.magnitude == 0, 0.0, bound + count * self.ranks * (record.eta + record.eta_r))

    def rounded(
        self,
        value: torch.Tensor,
        error: torch.Tensor,
        magnitude: torch.Tensor,
        num: Count = 0,
        *,
        stores: Count = 1,
        added: torch.Tensor | None = None,
    ) -> Parts:
        """Returns a result whose error includes the operation's roundings.

        The error is infinite if the result, or a share of the result, may overflow. If the operands have no error and
        the result is infinite, as in a mask, the result is exact.
        """
        masked = value.isinf() & (error == 0)
        error = error + self.own(Parts(value, error, magnitude), num, stores=stores, added=added)
        magnitude = torch.maximum(magnitude, value.double().abs()) + error
        allowed = where_finite(magnitude, self.record(value.dtype).largest, error)
        return Parts(value, torch.where(masked, 0.0, allowed), magnitude)

    def summed(self, value: torch.Tensor, error: torch.Tensor, magnitude: torch.Tensor, num: Count) -> Parts:
        """Returns a sum of `num` terms with its roundings. The ranks may divide the terms among them."""
        return self.rounded(value, error, magnitude, num, added=partial_sums(value, magnitude))


def partial_sums(value: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """Bounds the sum of any of the terms that add up to `value`, without errors."""
    return (magnitude + value.double().abs()) / 2


def gamma_of(num: Count, u: float) -> torch.Tensor | float:
    """Returns num u / (1 - num u), as `equivtest.oracle.rounding.gamma` does. `num` may be a tensor."""
    if isinstance(num, int):
        return num * u / (1 - num * u) if num * u < 1 else math.inf
    product = num.double() * u
    return torch.where(product < 1, product / (1 - product), math.inf)


def chosen(value: torch.Tensor, error: torch.Tensor) -> Parts:
    """Returns the result of an operation that rounds nothing, such as a maximum. Each rank holds the whole result.

    The result has no shares, because a program must add the shares of the operands before such an operation.
    """
    return Parts(value, error, value.double().abs() + error)
