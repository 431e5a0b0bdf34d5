"""Defines types for a kernel that computes in more bits than it stores: see `running_kernels`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from equivtest.oracle.running_roundings import Count


@dataclass(frozen=True)
class Out:
    """The result of a kernel before it is stored, and the way in which the kernel stores it.

    If a result is a sum over the ranks, the share of a rank is the addend that this rank holds.

    Attributes:
        stores: Number of times that the kernel stores an element while it computes the element. For a sum, this is the
            largest number of stored partial sums that contain the same term.
        one_by_one: True if each store adds one more term to the sum.
        is_sum: True if the result is a sum whose terms may be divided among the ranks.
        is_whole: True if a rank never holds only a share of the result, because the result is no sum.
        flushes: True if zero may be stored in place of a subnormal number.
        dtype: Dtype of the repeated stores. If None, this is the result's dtype.
        factors: (gradient, factor) if the result is their product, and each rank holds the whole factor but perhaps
            only a share of the gradient. None if the result is no such product.
    """

    tensor: torch.Tensor | None
    stores: Count = 1
    one_by_one: bool = False
    is_sum: bool = False
    is_whole: bool = False
    flushes: bool = False
    dtype: torch.dtype | None = None
    factors: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True)
class Kernel:
    """A call of a kernel whose operands have been widened.

    Attributes:
        dtype: Dtype of the operands before they were widened.
        stored: Function that rounds an intermediate result to `dtype`, if each rank has the whole result.
        stored_shares: Function that rounds an intermediate result to `dtype`, if a rank may have only a share of the
            result: see `Out`.
    """

    func: Any
    dtype: torch.dtype
    stored: Callable[[torch.Tensor], torch.Tensor]
    stored_shares: Callable[[torch.Tensor], torch.Tensor]
