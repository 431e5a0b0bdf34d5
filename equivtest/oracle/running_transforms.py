"""Rules of discrete Fourier transforms: see `equivtest.oracle.running_rules`.

Derived here, for the transform of n numbers z, and for S, the sum of |Re z| + |Im z|. An algorithm of Cooley and Tukey
has one pass for each factor r of n. A pass multiplies complex numbers by constants of size 1, which are rounded
themselves, and adds r such products. So each real part and each imaginary part has at most 2 r + 8 roundings of numbers
whose sizes add up to S at most. Later passes add these errors without making them larger. The error of a complex number
is at most the sum of the errors of its two parts. 2 r + 8 is at most 6 r, and the factors add up to n at most, so all
passes together have at most 12 n roundings of S.

A transform of n real numbers may be a transform of n / 2 complex numbers with one more pass, which adds two numbers and
may enlarge earlier errors by sqrt(2). 12 (n / 2) sqrt(2) is less than 12 n, and the pass itself has at most 24
roundings.

Each result is off by the sum of the errors of all elements at most. Each of the given half of the numbers of a real
result counts twice.

A library may compute long transforms of a length with a large prime factor by a convolution of another length
(Bluestein). The bound of such a transform is not derived here, so transforms of more than `LONGEST` elements have none.

Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 24.1; `fft_norm_mode` of
aten/src/ATen/native/SpectralOpsUtils.h (torch 2.13.0).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from equivtest.oracle.exact import InexactData
from equivtest.oracle.ranged import Parts
from equivtest.oracle.running_roundings import Roundings

TRANSFORMS = frozenset({"_fft_c2c", "_fft_r2c", "_fft_c2r"})
"""Operators of torch that `transform` computes."""

LONGEST = 32
"""Largest length of a transform with a bound."""

POWERS = {0: 0.0, 1: -0.5, 2: -1.0}
"""torch's `fft_norm_mode` -> power of the number of elements that multiplies the result."""

SCALED = 4
"""Roundings of the factor of a normalization, and of a product with it."""


def transform(r: Roundings, func: Any, operand: Any, dims: Sequence[int], normalization: int, *how: Any) -> Parts:
    """Computes _fft_c2c, _fft_r2c and _fft_c2r.

    Args:
        normalization: torch's `fft_norm_mode`.
        how: The last argument of the operator: the direction of `_fft_c2c`, whether `_fft_r2c` returns half of the
            numbers, or the length of the result of `_fft_c2r`.

    Raises:
        InexactData: a dim has more elements than `LONGEST`.
    """
    a = Parts.of(operand)
    value: torch.Tensor = func(a.value, dims, normalization, *how)
    if not dims:
        return Parts(value, a.error.clone(), a.magnitude.clone())
    sizes = [(a.value if value.is_complex() else value).shape[dim] for dim in dims]
    if max(sizes) > LONGEST:
        raise InexactData(f"no bound is known for a Fourier transform of more than {LONGEST} elements along a dim")
    scale, times = math.prod(sizes) ** POWERS[normalization], 1 if value.is_complex() else 2
    error, magnitude = (_added(part, dims).expand(value.shape) * scale * times for part in (a.error, a.magnitude))
    num = sum(12 * (size + 2) for size in sizes) + SCALED
    if not value.is_complex():
        return r.summed(value, error, magnitude, num)
    halves = [r.summed(half.contiguous(), error, magnitude, num) for half in torch.view_as_real(value).unbind(-1)]
    return Parts(value, *(torch.complex(one, other) for one, other in zip(*(half[1:] for half in halves), strict=True)))


def _added(part: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    sizes = part.real.abs() + part.imag.abs() if part.is_complex() else part.abs()
    return sizes.sum(list(dims), keepdim=True)
