"""What one operation may add to the distance between two correct programs: see `equivtest.kit.oracle.running_rules`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from equivtest.kit.oracle.ranged import Parts
from equivtest.kit.oracle.rounding import Arithmetic, gamma, underflow, where_finite
from equivtest.tensors import dtype_name

SPARE = 3  # roundings of a result beside those of its sum: a kernel may reorder factors, and divide by the ranks


@dataclass(frozen=True)
class Roundings:
    """What an operation itself may add, on so many ranks.

    Attributes:
        ranks: Each rank's share of a sum is stored, and a collective adds them.
    """

    arithmetic: Arithmetic
    ranks: int

    @property
    def u(self) -> float:
        """The largest unit of roundoff of accumulation, storage and collectives."""
        return max(self.arithmetic.u_a, self.arithmetic.u_o, self.arithmetic.u_r)

    @property
    def of_curve(self) -> int:
        """Of exp, erf and the like: an ulp is two units of roundoff at most."""
        return 2 * math.ceil(self.arithmetic.libm_ulp)

    def of_sum(self, num_terms: int) -> int:
        """Of so many terms, divided among the ranks."""
        return num_terms + 2 * self.ranks

    def own(self, magnitude: torch.Tensor, num: int, dtype: torch.dtype) -> torch.Tensor:
        """Of results of such magnitude, partial ones too, after `num` roundings and SPARE, in two programs."""
        count = num + SPARE
        u = max(self.u, torch.finfo(dtype).eps / 2)  # a module may compute in another dtype than its own
        lost = count * max(self.arithmetic.eta, self.arithmetic.eta_a, underflow(dtype_name(dtype)))
        return torch.where(magnitude == 0, 0.0, 2 * (gamma(count, u) * magnitude + lost))

    def rounded(self, value: torch.Tensor, error: torch.Tensor, magnitude: torch.Tensor, num: int = 0) -> Parts:
        """A result with what computing it adds: anything where it, or a share of it, may overflow.

        Infinity is for certain where nothing that came in is off, as in a mask.
        """
        masked = value.isinf() & (error == 0)
        error = error + self.own(magnitude, num, value.dtype)
        magnitude = torch.maximum(magnitude, value.double().abs()) + error
        largest = min(self.arithmetic.largest, torch.finfo(value.dtype).max)
        return Parts(value, torch.where(masked, 0.0, where_finite(magnitude, largest, error)), magnitude)


def chosen(value: torch.Tensor, error: torch.Tensor) -> Parts:
    """What nothing rounds, its shares added before."""
    return Parts(value, error, value.double().abs() + error)
