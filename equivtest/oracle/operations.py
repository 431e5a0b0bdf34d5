"""One operation at a time: exact where the operands allow it, else within a derived bound.

Every operand is a matrix (rows, columns) or a vector, float64, global, and holds what a subject's
dtype holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from equivtest.oracle.exact import Sum, find_integers, significand_bits, sum_products
from equivtest.tensors import DTYPES

COPIED = "equal: copied, nothing is computed"


@dataclass(frozen=True)
class Found:
    """What an operation gives.

    Attributes:
        value: float64, global.
        allowed: Largest error of a correct result per element, float64; None: equal by value.
        bits_used: Bits that the largest sum of magnitudes takes; 0 where that does not matter.
    """

    value: torch.Tensor
    allowed: torch.Tensor | None
    derivation: str
    bits_used: int = 0


@dataclass(frozen=True)
class Operations:
    """The operations of a perceptron in one dtype.

    Attributes:
        dtype: Name of the dtype in which every result is stored.
        must_be_exact: Raise where operands do not allow an exact result, as a fault of who drew them.
    """

    dtype: str
    must_be_exact: bool

    def copy(self, tensor: torch.Tensor) -> Found:
        """The tensor itself."""
        return Found(tensor, None, COPIED)

    def product(
        self, name: str, left: torch.Tensor, right: torch.Tensor, *, plus: torch.Tensor | None = None, divided_by: int = 1
    ) -> Found:
        """left (R, C) @ right (C, D) + plus (D,), which may be divided among so many ranks."""

        def exactly() -> Sum:
            integers = None if plus is None else find_integers("bias", plus)
            factors = find_integers("left", left), find_integers("right", right)
            return sum_products(name, *factors, DTYPES[self.dtype], plus=integers, divided_by=divided_by)

        return self._exact(exactly)

    def total(self, name: str, terms: torch.Tensor) -> Found:
        """The sum over rows of terms (R, C): (C,)."""
        ones = torch.ones((1, len(terms)), dtype=torch.float64)
        found = self.product(name, ones, terms)
        return Found(found.value[0], found.allowed, found.derivation, found.bits_used)

    def activation(self, kind: str, before: torch.Tensor) -> Found:
        """act(before), element by element."""
        assert kind == "relu"
        return Found(before.clamp(min=0), None, "equal: relu computes nothing")

    def activation_grad(self, kind: str, before: torch.Tensor, cotangent: torch.Tensor) -> Found:
        """act'(before) cotangent, element by element; relu's derivative at 0 is 0."""
        assert kind == "relu"
        passed = torch.where(before > 0, cotangent, 0.0)
        return Found(passed, None, "equal: relu's gradient is a copy or zero")

    def _exact(self, compute: Callable[[], Sum]) -> Found:
        found = compute()
        bits = significand_bits(DTYPES[self.dtype])
        return Found(
            found.value,
            None,
            f"equal: integers times a power of two, at most {found.bits_used} of {bits} bits",
            found.bits_used,
        )
