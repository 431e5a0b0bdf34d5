"""Computes one operation at a time, exactly if its operands allow it, and with a derived bound if they do not.

Operands are global float64 tensors: matrices (rows, columns) or vectors. Each element is a number of the subject's
dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from equivtest.layout import shard_bounds
from equivtest.oracle.activations import gelu, gelu_grad, relu, relu_grad, silu, silu_grad
from equivtest.oracle.contractions import product, total
from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.exact import (
    InexactData,
    Scaled,
    Sum,
    bits_of,
    find_integers,
    largest_of,
    significand_bits,
    sum_products,
    sum_terms,
)
from equivtest.oracle.expected import COPIED
from equivtest.oracle.rounding import Arithmetic, Bounded
from equivtest.tensors import DTYPES


@dataclass(frozen=True)
class Found:
    """The right result of an operation, either exact or with a bound.

    Attributes:
        value: The right result, a global float64 tensor.
        allowed: Largest error of a correct result per element, a float64 tensor. If None, a correct result equals
            `value`.
        bits_used: Number of bits of the largest sum of magnitudes; 0 if this number is unknown.
    """

    value: torch.Tensor
    allowed: torch.Tensor | None
    derivation: str
    bits_used: int = 0

    @classmethod
    def copy_of(cls, tensor: torch.Tensor) -> Found:
        return cls(tensor, None, COPIED)

    @classmethod
    def within(cls, bounded: Bounded) -> Found:
        return cls(bounded.value, bounded.allowed, bounded.derivation)

    @classmethod
    def exactly(cls, found: Sum, dtype: torch.dtype) -> Found:
        """Returns a result that a subject must equal, because its sums are exact. A subject stores it in `dtype`."""
        bits = significand_bits(dtype)
        text = f"equal: integers times a power of two, at most {found.bits_used} of {bits} bits"
        return cls(found.value, None, text, found.bits_used)


@dataclass(frozen=True)
class Operations:
    """Computes the right results of operations in one dtype, which `ranks` ranks may divide among them.

    Attributes:
        dtype: Name of the dtype in which every result is stored.
        must_be_exact: True if an inexact result means that the drawn values are wrong.
        may_be_exact: False for real numbers, which are never exact.
    """

    dtype: str
    ranks: int
    must_be_exact: bool
    may_be_exact: bool = True

    @property
    def arithmetic(self) -> Arithmetic:
        return arithmetic_of(self.dtype)

    def product(
        self, left: torch.Tensor, right: torch.Tensor, *, plus: torch.Tensor | None = None, split: str = ""
    ) -> Found:
        """Computes left (R, C) @ right (C, D) + plus (D,).

        Args:
            split: How the ranks divide the product. If 'contraction', C is divided among the ranks like a sharded dim,
                a collective adds the ranks' sums, and `plus` may be divided too. If 'tokens', C is the number of
                tokens, which a correct plan may gather or divide in any way. If '', one rank computes the product.
        """

        def exactly() -> Sum:
            factors, bias = (find_integers("left", left), find_integers("right", right)), None
            if plus is not None:
                bias = find_integers("bias", plus)
            divided_by = self.ranks if split else 1
            return sum_products("product", *factors, DTYPES[self.dtype], plus=bias, divided_by=divided_by)

        def bounded() -> Bounded:
            partials = self._partials(left, right) if split == "contraction" else None
            ranks = self.ranks if split else 1
            return product(left, right, self.arithmetic, plus=plus, ranks=ranks, partials=partials)

        return self.choose(exactly, bounded)

    def total(self, terms: torch.Tensor) -> Found:
        """Sums terms (T, C) over tokens, with the result (C,). The ranks may divide the tokens in any way."""

        def exactly() -> Sum:
            return sum_terms("total", find_integers("terms", terms), DTYPES[self.dtype])

        return self.choose(exactly, lambda: total(terms, 0, self.arithmetic, ranks=self.ranks))

    def activation(self, kind: str, before: torch.Tensor) -> Found:
        compute = {"relu": relu, "gelu": gelu, "silu": silu}[kind]
        return _equal_if_sure(kind, compute(before, self.arithmetic))

    def activation_grad(self, kind: str, before: torch.Tensor, cotangent: torch.Tensor) -> Found:
        """Multiplies the cotangent by the activation's derivative at `before`. The derivative of relu at 0 is 0."""
        compute = {"relu": relu_grad, "gelu": gelu_grad, "silu": silu_grad}[kind]
        return _equal_if_sure(kind, compute(before, cotangent, self.arithmetic))

    def weighted_sum(self, terms: Sequence[tuple[float, torch.Tensor]], bounded: Callable[[], Bounded]) -> Found:
        """Adds the products factor * tensor of all terms, or takes the result of `bounded` if they are not exact."""
        return self.choose(lambda: sum_scaled(terms, DTYPES[self.dtype]), bounded)

    def choose(self, exactly: Callable[[], Sum], bounded: Callable[[], Bounded]) -> Found:
        """Returns the exact result if the result is exact, and the bounded result if it is not.

        Raises:
            InexactData: the result is not exact although `must_be_exact` is True.
        """
        if self.may_be_exact:
            try:
                return Found.exactly(exactly(), DTYPES[self.dtype])
            except InexactData:
                if self.must_be_exact:
                    raise
        return Found.within(bounded())

    def _partials(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Returns, for each element of left @ right, the sum of the magnitudes of all ranks' shares of this element."""
        bounds = [shard_bounds(left.shape[1], self.ranks, rank) for rank in range(self.ranks)]
        shares = [(left[:, start:stop] @ right[start:stop]).abs() for start, stop in bounds]
        return torch.stack(shares).sum(0)


def sum_scaled(terms: Sequence[tuple[float, torch.Tensor]], dtype: torch.dtype) -> Sum:
    """Adds the products factor * tensor of all terms exactly, if no order of the additions rounds in `dtype`.

    Raises:
        InexactData: the magnitudes of the terms add up to more than the significand of `dtype` can represent.
    """
    scaled = []
    for factor, tensor in terms:
        integers, times = (
            find_integers("terms", tensor),
            find_integers("factor", torch.tensor(factor, dtype=torch.float64)),
        )
        if bits_of(largest_of(integers.integers)) + bits_of(largest_of(times.integers)) > 60:
            raise InexactData(f"{factor} times the terms takes more than 60 bits")
        scaled.append(Scaled(integers.integers * times.integers, integers.exponent + times.exponent))
    unit = min(term.exponent for term in scaled)
    counted = [term.in_units(unit) for term in scaled]
    magnitudes = torch.stack([term.abs().double() for term in counted]).sum(0)
    bits_used = bits_of(int(magnitudes.max())) if magnitudes.numel() else 1
    if bits_used > significand_bits(dtype):
        raise InexactData(f"magnitudes of a weighted sum take {bits_used} bits")
    total = torch.stack(counted).sum(0)
    return Sum(torch.ldexp(total.to(torch.float64), torch.tensor(unit)), bits_used)


def _equal_if_sure(kind: str, bounded: Bounded) -> Found:
    return Found(bounded.value, None, bounded.derivation) if kind == "relu" else Found.within(bounded)
