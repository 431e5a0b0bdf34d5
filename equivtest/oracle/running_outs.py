"""A call of a kernel that computes in more bits than it stores, and what it gives: `running_kernels`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from equivtest.oracle.running_roundings import Count


@dataclass(frozen=True)
class Out:
    """What a kernel gives before it is stored.

    Attributes:
        stores: How often each element is stored while it is computed, a term of a sum at most.
        one_by_one: Whether each store is of a sum of one more of the terms.
        is_sum: Whether a rank may hold but a part of its terms.
        is_whole: Whether no rank may hold a share of it, as what it is made of in another way than as a sum.
        flushes: Whether zero may be stored in place of a subnormal number.
        dtype: In which it is stored as often; None: in that of the result.
        factors: A gradient, each rank may hold a share of it, and its factor, which is whole; None: no such product.
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
    """One call.

    Attributes:
        func: The operator.
        dtype: Of the operands, in fewer bits.
        stored: What an intermediate becomes that the kernel stores as its operands are; no rank holds a share of it.
        stored_shares: The same, except that each rank may hold a share.
    """

    func: Any
    dtype: torch.dtype
    stored: Callable[[torch.Tensor], torch.Tensor]
    stored_shares: Callable[[torch.Tensor], torch.Tensor]
