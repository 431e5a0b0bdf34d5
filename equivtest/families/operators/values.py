"""Draws the operands' values. The terms of a partial operand, one per rank, reduce to the drawn value.

Integers are multiples of the world size, because DTensor divides a replicated tensor by the world size before it adds
that tensor to a partial tensor.

Source: Partial._partition_value in torch/distributed/tensor/placement_types.py (2.13.0).
"""

from __future__ import annotations

import math

import torch

from equivtest.cases.case import Shape
from equivtest.cases.values import draw
from equivtest.cases.values.integers import generator, odd_integers, permutation, signs
from equivtest.cases.values.real import nearly_normal, without_subnormals
from equivtest.families.operators.case import EXACT_MODE, REAL_MODE, OperatorCase
from equivtest.families.operators.case_operator import (
    ABOVE,
    BIDIAGONAL,
    BITS,
    BOOLS,
    DIAGONAL,
    DISTINCT,
    FEW,
    FRACTION,
    HALVES,
    INDEX,
    MATRICES,
    MOST,
    POSITIVE,
    POWERS,
    SIGNS,
    UNIT,
    WHOLE,
)
from equivtest.tensors import DTYPES, SIGNIFICAND_BITS

_LARGEST = {8: 1, 11: 1}
"""Largest magnitude of integers, before they are multiplied by the world size, by significand bits; 3 if not listed."""


@draw.register
def draw_operators(case: OperatorCase, index: int) -> dict[str, torch.Tensor]:
    """Draws the operands and the cotangents. A partial tensor is the stack of its terms, one per rank.

    Modes:
        dense: Integers of the operator's domain, such as positive integers. The terms of a partial operand reduce
            exactly to such integers.
        real: Numbers that use all bits of the significand.
    """
    mode, seed = case.values[index]
    given = {}
    for name in case.given_names():
        kind, _, number = name.partition(".")
        source = generator(mode, seed, name)
        if kind == "cotangent":
            value = _draw_cotangent(case, mode, case.whole_shape(name), source)
            given[name] = _stacked(case, name, value, (mode, ""), source).to(DTYPES[case.results[int(number)].dtype])
        else:
            given[name] = _draw_operand(case, int(number), mode, source)
    return given


def _draw_cotangent(case: OperatorCase, mode: str, shape: Shape, source: torch.Generator) -> torch.Tensor:
    if mode == REAL_MODE:
        return without_subnormals(nearly_normal(shape, source))
    return odd_integers(shape, 1, 1, source) * case.world_size


def _draw_operand(case: OperatorCase, number: int, mode: str, source: torch.Generator) -> torch.Tensor:
    shape, kind = case.operands[number], case.kind_of(number)
    if kind == BOOLS:
        return torch.randint(2, shape, generator=source, device="cpu").bool()
    if kind == WHOLE:
        limit = int((case.domain_of(number).partition(" ")[2] if case.holds else "") or 8)
        if case.operator.startswith("index_copy") and math.prod(shape) <= limit:  # undefined if two are equal
            return torch.randperm(limit, generator=source, device="cpu")[: math.prod(shape)].reshape(shape)
        return torch.randint(limit, shape, generator=source, device="cpu")
    if kind == INDEX:
        return torch.randint(max(case.index_limit(), 1), shape, generator=source, device="cpu")
    dtype, fewest = case.dtype_of(number), min(case.dtypes, key=SIGNIFICAND_BITS.__getitem__)
    domain = case.domain_of(number)
    is_exact = mode == EXACT_MODE
    value = _draw_exact(case, shape, (fewest, domain), source) if is_exact else _draw_real(shape, domain, source)
    return _stacked(case, f"operand.{number}", value, (mode, domain), source).to(DTYPES[dtype])


def _stacked(
    case: OperatorCase, name: str, value: torch.Tensor, of: tuple[str, str], source: torch.Generator
) -> torch.Tensor:
    """Returns the value, or the terms of a partial tensor `name`, with one dim per partial axis."""
    return _parts_of(value, *case.reduction(name), of, source).reshape(case.shapes()[name])


def _draw_exact(case: OperatorCase, shape: Shape, of: tuple[str, str], source: torch.Generator) -> torch.Tensor:
    """Draws values for which operators are exact. `of` is the pair (dtype, domain) of these values."""
    (dtype, domain), num = of, math.prod(shape)
    if domain in MATRICES:
        return _draw_matrix(shape, domain, source)
    if domain == POWERS:
        return signs(shape, source) * 2 ** torch.randint(2, shape, generator=source, device="cpu")
    if domain == DISTINCT:
        return (permutation(num, source) - num // 2).reshape(shape)
    if domain == SIGNS:
        return signs(shape, source)
    if domain in (FEW, MOST):
        return _few_or_most(shape, domain, source)
    if domain in (BITS, FRACTION):
        bits = torch.randint(2, shape, generator=source, device="cpu")
        return bits if domain == BITS else (1 + bits) / 4
    largest = _LARGEST.get(SIGNIFICAND_BITS[dtype], 3)
    value = odd_integers(shape, 1, largest, source) * case.world_size
    if domain == HALVES:
        return value / (2 * (case.world_size & -case.world_size))
    if domain == ABOVE:
        return 2 * value.abs()
    return value.abs() if domain in (POSITIVE, UNIT) else value


def _few_or_most(shape: Shape, domain: str, source: torch.Generator) -> torch.Tensor:
    is_rare = torch.randint(6, shape, generator=source, device="cpu") == 0
    return (is_rare if domain == FEW else ~is_rare).long()


def _draw_matrix(shape: Shape, domain: str, source: torch.Generator) -> torch.Tensor:
    size = shape[-1]
    if domain == DIAGONAL:
        order = torch.rand(shape[:-1], generator=source, device="cpu").argsort(-1)
        return torch.diag_embed(signs(shape[:-1], source) * 2.0**order)
    above = signs(shape[:-1], source).float() * (torch.arange(size, device="cpu") + 1 < size)
    upper = torch.eye(size, device="cpu") + above[..., None] * torch.eye(size, device="cpu").roll(1, -1)
    return upper if domain == BIDIAGONAL else upper.mT @ upper


def _draw_real(shape: Shape, domain: str, source: torch.Generator) -> torch.Tensor:
    if domain in MATRICES:
        return _draw_matrix(shape, domain, source)
    if domain in (FEW, MOST):
        return _few_or_most(shape, domain, source)
    if domain == BITS:
        return torch.randint(2, shape, generator=source, device="cpu")
    value = without_subnormals(nearly_normal(shape, source))  # of a magnitude of at most 3
    if domain in (POSITIVE, ABOVE):
        return value.abs() + (0.25 if domain == POSITIVE else 1.25)
    if domain == FRACTION:
        return value.abs() / 4 + 0.125
    return value / 4 if domain == UNIT else value


def _parts_of(value: torch.Tensor, op: str, num: int, of: tuple[str, str], source: torch.Generator) -> torch.Tensor:
    """Returns `num` terms of mixed sign that `op` reduces to `value`. `of` is the pair (mode, domain)."""
    if not op:
        return value.unsqueeze(0)
    (mode, domain), rest = of, (num - 1, *value.shape)
    largest = 7 if op in ("max", "min") else 3  # far enough that one rank's term is on the other side of a number
    other = odd_integers(rest, 1, largest, source) if mode == EXACT_MODE else nearly_normal(rest, source)
    other = other / 4 if domain == HALVES else other
    if op == "sum":
        parts = torch.cat([other, (value - other.sum(0)).unsqueeze(0)])
    elif op == "avg":
        other = other * num  # so that integers are divided without a remainder
        parts = torch.cat([other, (value * num - other.sum(0)).unsqueeze(0)])
    else:
        apart = other.abs() if op == "min" else -other.abs()
        parts = torch.cat([value + apart, value.unsqueeze(0)])
    order = torch.rand((num, *value.shape), generator=source, device="cpu").argsort(0)
    return parts.gather(0, order)
