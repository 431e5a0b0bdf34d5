"""Computes with complex numbers, which many rotary embeddings use, as pairs of real numbers.

The error and the magnitude of a complex `Ranged` tensor are complex too, with separate real and imaginary parts. So an
operation that moves the value also moves the error and the magnitude. Arithmetic becomes real arithmetic, with the
rules of `equivtest.oracle.running_rules`: a product is four products and two sums, as in torch's kernels.

Source: c10/util/complex.h and aten/src/ATen/cpu/vec/vec256/vec256_complex_float.h (torch 2.13.0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Pair = tuple[Any, Any]
"""The real and the imaginary part; each a tensor or a number."""


def product(left: Any, right: Any) -> torch.Tensor:
    (a, b), (c, d) = _pair(left), _pair(right)
    if not _is_complex(right):
        return _joined(a * c, b * c)
    if not _is_complex(left):
        return _joined(a * c, a * d)
    return _joined(a * c - b * d, a * d + b * c)


def plus(left: Any, right: Any, *, alpha: float = 1) -> torch.Tensor:
    (a, b), (c, d) = _pair(left), _pair(right)
    real, imaginary = a + alpha * c, b + alpha * d
    return _joined(real, imaginary + torch.zeros_like(real))


def minus(left: Any, right: Any, *, alpha: float = 1) -> torch.Tensor:
    return plus(left, right, alpha=-alpha)


def polar(length: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    return _joined(length * angle.cos(), length * angle.sin())


def conjugate(operand: torch.Tensor) -> torch.Tensor:
    real, imaginary = _pair(operand)
    return _joined(real, -imaginary)


def copied(target: torch.Tensor, source: Any, *_: Any) -> torch.Tensor:
    """Computes `copy` into a complex tensor, whose shape the source may lack."""
    real, imaginary = _pair(source)
    imaginary = imaginary if isinstance(imaginary, torch.Tensor) else torch.zeros_like(real)
    return _joined(real.expand(target.shape), imaginary.expand(target.shape))


def padded(operand: torch.Tensor, pad: list[int], value: complex = 0) -> torch.Tensor:
    real, imaginary = _pair(operand)
    value = complex(value)
    return _joined(*(torch.constant_pad_nd(*each) for each in ((real, pad, value.real), (imaginary, pad, value.imag))))


def _pair(operand: Any) -> Pair:
    if _is_complex(operand):
        if isinstance(operand, torch.Tensor):
            return torch.view_as_real(operand).unbind(-1)  # type: ignore[return-value]
        return operand.real, operand.imag
    return operand, 0.0


def _joined(real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(torch.stack([real, imaginary], -1))


def _is_complex(operand: Any) -> bool:
    return isinstance(operand, complex) or (isinstance(operand, torch.Tensor) and operand.is_complex())


def has_complex(values: Any) -> bool:
    return any(_is_complex(each) for each in values)


APART: dict[str, Callable[..., Any]] = {
    "mul": product, "add": plus, "sub": minus, "polar": polar, "_conj": conjugate, "complex": _joined,
    "copy": copied, "constant_pad_nd": padded,
}  # fmt: skip
"""Operator with complex operands or results -> the same in real arithmetic, with the operator's own arguments."""

MAKES = frozenset({"view_as_complex", "polar", "complex", "_fft_r2c"})
"""Operations with real operands and a complex result."""

VIEWS = frozenset({"view_as_complex", "view_as_real"})
"""Operations that view pairs as complex numbers, or complex numbers as pairs."""
