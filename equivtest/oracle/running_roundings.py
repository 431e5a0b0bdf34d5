"""What one operation may add to the distance between two correct programs: see `equivtest.oracle.running_rules`.

Two programs round: the unsharded module, and a parallel one.  Each computes in `accumulate`, where n terms in any order
take n roundings, with SPARE beside; each stores what comes out once, in the tensor's dtype, which is no rounding more
where that is what it computes in.  Of what the parallel one holds in shares, one a rank, each share is stored, together
no more than the shares' magnitudes; and a collective adds them, which rounds every sum of some shares to `reduce`.

Derived here.  A sum of some of the shares, or of their terms, is at most that of the positive or that of the negative
ones, (m + |v|) / 2 with m the sum of magnitudes (`equivtest.oracle.rounding.after_additions`).

Source: at::opmath_type and at::acc_type of torch 2.13.0, which kernels of 16 bits compute in; for each of the products,
sums and curves of `equivtest.oracle.running_rules` measured by `python -m studies.bounded_ops`.
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

SPARE = 3  # roundings of a result beside those of its sum: a kernel may reorder factors, and divide by a number

Count = int | torch.Tensor
"""How many roundings, of all elements or of each."""


@dataclass(frozen=True)
class Roundings:
    """What an operation itself may add, on so many ranks.

    Attributes:
        arithmetic: Of the dtype in which the module is judged.
        ranks: Each rank's share of a sum is stored, and a collective adds them.
        coarse: Of a dtype that whatever would be computed in more bits may be computed and stored in; None where what
            is computed says so itself.
    """

    arithmetic: Arithmetic
    ranks: int
    coarse: Arithmetic | None = None

    @property
    def of_curve(self) -> int:
        """Units of roundoff of exp, erf and the like: an ulp is two of them at most."""
        return 2 * math.ceil(self.arithmetic.libm_ulp)

    @property
    def words(self) -> str:
        """Where the module's own dtype rounds."""
        record = self.arithmetic
        return f"computed in {record.accumulate}, stored in {record.dtype}, added up in {record.reduce}"

    def record(self, dtype: torch.dtype) -> Arithmetic:
        """How results of a dtype are computed, which may be another than the module's own.

        What the backend does not declare of it computes in it, stores and adds up in it.

        Raises:
            InexactData: it has whole numbers alone.
        """
        if not dtype.is_floating_point:
            raise InexactData(f"of a sum in {str(dtype).removeprefix('torch.')} of what may be off no bound is known")
        name, own = dtype_name(dtype), self.arithmetic
        if self.coarse is not None and unit_roundoff(name) <= self.coarse.u_o:
            return self.coarse
        if name == own.dtype:
            return own
        return declared_of(name) or replace(own, dtype=name, accumulate=name, reduce=name)

    def where_unknown(self, dtype: torch.dtype) -> Roundings:
        """The same where an operation on a dtype may add up in it, and store all that it computes."""
        return replace(self, coarse=replace(self.record(dtype), accumulate=dtype_name(dtype)))

    def own(
        self,
        parts: Parts,
        num: Count = 0,
        *,
        stores: Count = 1,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What `num` roundings in `accumulate`, SPARE ones and so many stores come to, in the two programs.

        Args:
            parts: The result, with what its operands bring.
            stores: In the tensor's own dtype, of what is added up in it.
            added: The largest sums of some shares that a collective may add up here; nowhere else where None.
        """
        record, error = self.record(parts.value.dtype), parts.error
        count = num + SPARE
        found = 2 * gamma_of(count, record.u_a) * parts.magnitude
        lost = 2 * count * record.eta_a
        further = stores - int(record.accumulate == record.dtype)  # one is among those that compute
        held = self._held(parts, stores)
        unsharded = parts.size if isinstance(stores, int) and stores == 1 else parts.magnitude
        found = found + gamma_of(further, record.u_o) * (held + error + unsharded)
        lost = lost + (self.ranks + 1) * further * record.eta
        if added is not None:
            found = found + self._added_up(record, parts, added, error + found)
            lost = lost + self.ranks * (record.eta_r + underflow(record.reduce))
        return torch.where(parts.magnitude == 0, 0.0, found + lost)

    def divided(self, parts: Parts) -> torch.Tensor:
        """What dividing a whole into shares, one a rank, rounds."""
        record = self.record(parts.value.dtype) if parts.value.is_floating_point() else self.arithmetic
        found = (record.u_o * parts.reach + self.ranks * record.eta) * int(self.ranks > 1)
        return torch.where(parts.magnitude == 0, 0.0, found)

    def stored(
        self, parts: Parts, dtype: torch.dtype, stores: Count, *, is_sum: bool = False, one_by_one: bool = False
    ) -> Parts:
        """What was computed in more bits, stored: by the unsharded module once, by another program so many times.

        Where terms are added one by one, each store is of a partial sum; so it is where ranks have some terms each, as
        the stores are divided as the terms are: the ranks whose largest sum is of positive terms together store no
        more than the sum of these, times how many terms they have.
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
        found = where_finite(magnitude, record.largest, error)
        return Parts(value, torch.where(parts.value.isinf() & (parts.error == 0), 0.0, found), magnitude)

    def _added_up(self, record: Arithmetic, parts: Parts, most: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        """What a collective's additions round: those before the last come to `most`, the last to the whole."""
        if self.ranks == 1:
            return torch.zeros_like(error)
        earlier = gamma_of(self.ranks - 2, record.u_r) * (most + 1.5 * error)
        return earlier + record.u_r * (parts.size + error + earlier)

    def _held(self, parts: Parts, stores: Count) -> torch.Tensor:
        """What is stored at a time, of all ranks: the whole, unless terms are added up in it or shares."""
        is_whole = self.ranks == 1 and isinstance(stores, int) and stores == 1
        return parts.reach if is_whole else parts.magnitude

    def averaged(self, parts: Parts) -> torch.Tensor:
        """What a mean over the ranks adds to a result, of which each holds a share or the whole.

        Shares are divided before or the sum after, or both, by a number that is a power of two, or twice rounded, as a
        product with a reciprocal is.  Shares were added up already; wholes are added here, where two halves round
        nothing.
        """
        record, reach = self.record(parts.value.dtype), parts.reach
        divisions = 0 if self.ranks & (self.ranks - 1) == 0 else 2
        additions = self.ranks - 1 if self.ranks > 2 else 0
        found = gamma_of(divisions, record.u_o) * (parts.magnitude + reach)
        found = found + gamma_of(additions, record.u_r) * (1 + gamma_of(divisions, record.u_o)) * reach
        return torch.where(parts.magnitude == 0, 0.0, found + 2 * (self.ranks - 1) * (record.eta + record.eta_r))

    def one_by_one(self, parts: Parts, num: int) -> torch.Tensor:
        """What a program rounds that adds up the shares of `num` results, and stores and adds again, in any order.

        Ranks may add up what each holds and a collective the sums, or a collective each result.  Either way a share is
        part of so many sums as are counted here, which round all shares together, relative to their magnitudes.
        """
        record = self.record(parts.value.dtype)
        count = num - 1 + self.ranks - 1
        found = gamma_of(count, max(record.u_o, record.u_r)) * (parts.magnitude + parts.error)
        return torch.where(parts.magnitude == 0, 0.0, found + count * self.ranks * (record.eta + record.eta_r))

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
        """A result with what computing it adds: anything where it, or a share of it, may overflow.

        Infinity is for certain where nothing that came in is off, as in a mask.
        """
        masked = value.isinf() & (error == 0)
        error = error + self.own(Parts(value, error, magnitude), num, stores=stores, added=added)
        magnitude = torch.maximum(magnitude, value.double().abs()) + error
        found = where_finite(magnitude, self.record(value.dtype).largest, error)
        return Parts(value, torch.where(masked, 0.0, found), magnitude)

    def summed(self, value: torch.Tensor, error: torch.Tensor, magnitude: torch.Tensor, num: Count) -> Parts:
        """A sum of so many terms, divided among the ranks."""
        return self.rounded(value, error, magnitude, num, added=partial_sums(value, magnitude))


def partial_sums(value: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """What a sum of some of the terms comes to at most, but for what they are off by."""
    return (magnitude + value.double().abs()) / 2


def gamma_of(num: Count, u: float) -> torch.Tensor | float:
    """As `equivtest.oracle.rounding.gamma`, of each element where each has a count of its own."""
    if isinstance(num, int):
        return num * u / (1 - num * u) if num * u < 1 else math.inf
    product = num.double() * u
    return torch.where(product < 1, product / (1 - product), math.inf)


def chosen(value: torch.Tensor, error: torch.Tensor) -> Parts:
    """What nothing rounds, its shares added before."""
    return Parts(value, error, value.double().abs() + error)
