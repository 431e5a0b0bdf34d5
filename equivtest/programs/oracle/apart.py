"""Runs attention and LSTMs as operations with known bounds, even if a module asks for other kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


class TakesApart(TorchFunctionMode):
    """Splits attention of 32 bits or more into products and softmaxes, and an LSTM into its steps.

    The mode overrides the kernels that the module asks for. Attention in 16 bits, or under autocast, may stay in one
    kernel, because the CPU's kernel rounds more than the separate operations.  An LSTM is split because oneDNN takes
    all steps at once.

    Source: torch.nn.attention.sdpa_kernel, torch.backends.mkldnn.flags (2.13.0).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.lstm:
            with _without_onednn():
                return func(*args, **(kwargs or {}))
        if func not in (functional.scaled_dot_product_attention, functional.multi_head_attention_forward):
            return func(*args, **(kwargs or {}))
        query = args[0] if args else (kwargs or {})["query"]
        is_narrow = torch.is_autocast_enabled("cpu") or query.dtype in (torch.bfloat16, torch.float16)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if is_narrow else SDPBackend.MATH):
            return func(*args, **(kwargs or {}))


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Disables oneDNN without the warning about TF32 that torch.backends.mkldnn.flags emits (torch 2.13.0)."""
    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # noqa: FBT003
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)
