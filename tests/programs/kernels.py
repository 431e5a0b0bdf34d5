"""Kernels of the device written in Python that are wrong in the one way that KERNEL names; '' is honest."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from tests.programs import python_device

KERNEL = "EQUIVTEST_TEST_KERNEL"
"""Environment variable: a key of KERNELS, or ''."""

Spoil = Callable[[Any], None]


def last_is_zero(found: Any) -> None:
    """A kernel that forgets its last element."""
    first = found[0] if isinstance(found, tuple | list) else found
    if first.numel():
        first.view(-1)[-1:] = 0


def first_is_doubled(found: Any) -> None:
    first = found[0] if isinstance(found, tuple | list) else found
    if first.numel():
        first.view(-1)[:1] *= 2


def fewer_bits(found: Any) -> None:
    """A kernel that computes in 8 bits of significand."""
    first = found[0] if isinstance(found, tuple | list) else found
    if first.is_floating_point():
        first.copy_(first.bfloat16())


def is_nan(found: Any) -> None:
    first = found[0] if isinstance(found, tuple | list) else found
    first.view(-1)[:1] = torch.nan


def raises(found: Any) -> None:
    raise RuntimeError("the kernel was compiled for another device")


def first_two_swapped(found: Any) -> None:
    """A kernel that moves, and swaps two elements."""
    if found.numel() > 1:
        found.view(-1)[:2] = found.view(-1)[:2].flip(0).clone()


KERNELS: dict[str, tuple[str, Spoil]] = {
    "mm_fewer_bits": ("mm", fewer_bits),
    "mm_raises": ("mm", raises),
    "addmm_last_is_zero": ("addmm", last_is_zero),
    "sum_first_is_doubled": ("sum", first_is_doubled),
    "embedding_last_is_zero": ("index_select", last_is_zero),
    "embedding_backward_doubled": ("embedding_dense_backward", first_is_doubled),
    "layer_norm_fewer_bits": ("native_layer_norm", fewer_bits),
    "layer_norm_backward_nan": ("native_layer_norm_backward", is_nan),
    "relu_last_is_zero": ("relu", last_is_zero),
    "cat_swapped": ("cat", first_two_swapped),
    "mul_fewer_bits": ("mul", fewer_bits),
    "add_last_is_zero": ("add", last_is_zero),
}  # fmt: skip
"""Name of the fault -> the operator, and the change to its results."""

if kernel := os.environ.get(KERNEL, ""):
    operator, spoil = KERNELS[kernel]
    python_device.spoils[operator] = spoil
