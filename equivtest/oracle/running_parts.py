"""Decomposes operations that are missing in torch's table of decompositions, as torch computes them on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from equivtest.oracle.exact import InexactData
from equivtest.oracle.running_special import APART as TRIANGULAR


def grouped_products(
    left: torch.Tensor,
    right: torch.Tensor,
    ends: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Computes one matrix product for each group of rows, of columns, or of summed terms, like torch._grouped_mm.

    `ends` has the index behind the last element of each group. If `ends` is None, the result is a batch of products, as
    in torch.bmm.

    Source: _grouped_mm_fallback in ATen/native/GroupedMMUtils.h (2.13.0): torch.mm for each group.

    Raises:
        InexactData: there is a bias, rows or columns behind the last group stay unwritten, or the result has
            another dtype.
    """
    if bias is not None or out_dtype not in (None, left.dtype):
        raise InexactData("no bound is known for _grouped_mm, except for a plain product of one dtype")
    if ends is None:
        return torch.bmm(left, right)
    stops = ends.tolist()
    groups = list(zip([0, *stops[:-1]], stops, strict=True))
    if left.dim() == right.dim():
        return torch.stack([left[:, start:stop] @ right[start:stop] for start, stop in groups])
    divided = left.shape[0] if left.dim() == 2 else right.shape[-1]
    if not stops or stops[-1] != divided:
        raise InexactData(f"_grouped_mm leaves elements unwritten behind its last group, which ends at {stops[-1:]}")
    if left.dim() == 2:
        return torch.cat([left[start:stop] @ each for (start, stop), each in zip(groups, right, strict=True)])
    return torch.cat([each @ right[:, start:stop] for (start, stop), each in zip(groups, left, strict=True)], -1)


APART: dict[str, Callable[..., Any]] = {"_grouped_mm": grouped_products, **TRIANGULAR}
"""Operator -> decomposition, which takes the operator's own arguments."""
