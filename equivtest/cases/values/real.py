"""Draws numbers that use their whole significand, with the same bits on every machine.

Every number is made from integers of torch's generator by sums and products of float64 alone.  IEEE 754 fixes each bit
of a sum or product. torch.randn computes logarithms and cosines, which may differ between machines.
"""

from __future__ import annotations

import torch

_UNIFORM_BITS = 50


def nearly_normal(shape: tuple[int, ...], source: torch.Generator) -> torch.Tensor:
    """Draws float64 numbers with mean 0 and variance 1: sums of three uniform numbers, never zero."""
    high = 2**_UNIFORM_BITS
    uniform = torch.randint(-high, high, (3, *shape), generator=source, device="cpu").sum(0)
    return (uniform + (uniform >= 0)).to(torch.float64) * 2.0**-_UNIFORM_BITS


def without_subnormals(value: torch.Tensor) -> torch.Tensor:
    """Replaces each number below 2**-14 in magnitude, float16's smallest normal number, by 2**-14."""
    return torch.where(value.abs() < 2.0**-14, 2.0**-14, value)
