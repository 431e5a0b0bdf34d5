"""A call of a kernel that computes in more bits than it stores, and its result: `running_kernels`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from equivtest.oracle.running_roundings import Count


@dataclass(frozen=True)
class Out:
    """The result of a kernel before the kernel stores the result.

    Attributes:
        stores: How often each element is stored while it is computed, at most one term of a sum.
        one_by_one: True if each store adds one more term to the sum.
        is_sum: True if a rank may have only a part of the terms of the result.
        is_whole: True if no rank may have only a share of the result, because the result is no sum.
        flushes: True if zero may be stored in place of a subnormal number.
        dtype: Dtype of the repeated stores; None: the result's dtype.
        factors: A gradient, of which each rank may hold a share, and its whole factor; None: no such product.
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
    """One call of a kernel.

    Attributes:
        func: The operator.
        dtype: Dtype of the operands, with fewer bits.
        stored: Stores an intermediate result in the operands' dtype; no rank holds only a share of it.
        stored_shares: The same for a result of which each rank may hold a share.
    """

    func: Any
    dtype: torch.dtype
    stored: Callable[[torch.Tensor], torch.Tensor]
    stored_shares: Callable[[torch.Tensor], torch.Tensor]
