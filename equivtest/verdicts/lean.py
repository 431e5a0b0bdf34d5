"""Errors that lean to one side: a second detector on real data, where rounding is to nearest.

Each element may be within its bound and all of them too large: an average of half an ulp in one
direction is no rounding.  For errors e_i that are independent and as likely to be e as -e, and any
weights c_i,

    P( |sum c_i e_i| >= lam sqrt(sum (c_i e_i)**2) ) <= 2 exp(-lam**2 / 2),

whatever their sizes, known or not.  With lam = 9 that is 6e-18 for each sum.  The left side cannot
exceed sqrt(n) for n errors that are not zero, so tensors of 81 or fewer are never judged.

What is summed: the whole tensor, each row, each column, each shard; with weights 1 and with the
right values as weights, which shows a factor that is slightly off.  Replicas count once: the same
error on every rank is one error.  That errors are independent is an assumption: those of one row
share operands, though no rounding.  In float64 an error includes that of the reference itself,
which rounds to nearest too.

What is left out, since its errors are not independent or not symmetric:
- tensors that the oracle does not declare so (`ExpectedTensor.is_symmetric`): of backends that do
  not round to nearest; outputs to which a rounded bias / w was added in every row, one rounding
  for many elements; sums of few terms, since 16-bit products with one factor a little above a power
  of two are rounded down more often than up, where small significands are more frequent than large;
- partial layouts, whose operands are added here and not by the subject;
- elements with an infinite allowance, which may have overflowed, all in one direction.

Source: Hoeffding's inequality for random signs, given the sizes |e_i|; de la Pena, Lai and Shao,
Self-Normalized Processes, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from equivtest import limits
from equivtest.layout import Layout, flat_axis, replicas
from equivtest.oracle.expected import ExpectedTensor
from equivtest.tensors import Placed
from equivtest.verdicts.elements import Part, is_partial, parts_of
from equivtest.verdicts.verdict import Mismatch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Lean:
    """A sum of errors that is too far from zero: `ratio` is |sum| / sqrt(sum of squares)."""

    ratio: float
    what: str
    rank: int
    mean: float
    num_errors: int


def judge_lean(
    name: str, expected: ExpectedTensor, answers: Mapping[int, Placed], mesh_shape: Shape
) -> Mismatch | None:
    """The sum that leans most, if one does so beyond limits.LEAN.

    Shapes and dtypes are already known to be right.
    """
    layout = next(iter(answers.values())).layout
    if not expected.is_symmetric or is_partial(layout) or any(a.layout != layout for a in answers.values()):
        return None
    parts = _distinct(parts_of(expected, answers, mesh_shape), layout, mesh_shape)
    worst = max(_leans(parts, expected, layout), key=lambda lean: lean.ratio, default=None)
    if worst is None or worst.ratio < limits.LEAN:
        return None
    return Mismatch(
        name,
        worst.rank,
        expected="errors on both sides of zero",
        actual=f"errors that lean to one side, by {worst.mean:.2g} on average",
        global_shape=tuple(expected.value.shape),
        layout=str(layout),
        derivation=(
            f"|sum of errors| is {worst.ratio:.1f} times the root of the sum of their squares, {limits.LEAN:g} is "
            f"allowed: rounding to nearest passes that with probability {2 * math.exp(-(limits.LEAN**2) / 2):.0e}"
        ),
        extent=f"{worst.num_errors} errors of {worst.what}",
    )


def _distinct(parts: list[Part], layout: Layout, mesh_shape: Shape) -> list[Part]:
    """One part of each group of ranks that hold the same, empty ones left out."""
    first = {group[0] for group in replicas(layout, mesh_shape)}
    return [part for part in parts if part.rank in first and part.actual.numel()]


def _leans(parts: list[Part], expected: ExpectedTensor, layout: Layout) -> Iterator[Lean]:
    whole = torch.zeros_like(expected.value)
    for part in parts:
        errors = torch.where(part.allowed.isfinite(), part.actual - part.expected, 0.0).nan_to_num()
        if len(parts) > 1:
            yield from _sums(
                errors.reshape(1, -1), part.expected.reshape(1, -1), f"rank {part.rank}'s shard", part.rank
            )
        if flat_axis(layout) is None:
            whole[tuple(slice(start, start + size) for start, size in zip(part.start, errors.shape, strict=True))] = (
                errors
            )
        else:
            whole.view(-1)[part.start[0] : part.start[0] + errors.numel()] = errors
    right = expected.value
    yield from _sums(whole.reshape(1, -1), right.reshape(1, -1), "the whole tensor", 0)
    if right.dim() > 1:
        rows, weights = whole.reshape(-1, right.shape[-1]), right.reshape(-1, right.shape[-1])
        yield from _sums(rows, weights, "one row", 0)
        yield from _sums(rows.T, weights.T, "one column", 0)


def _sums(errors: torch.Tensor, right: torch.Tensor, what: str, rank: int) -> Iterator[Lean]:
    """The sum of each row (dim 1) of errors that leans most, with weights 1 and `right`."""
    if not errors.numel():
        return
    counts = (errors != 0).sum(1)
    for weighted in (errors, errors * right):
        scale = weighted.abs().amax(1, keepdim=True)  # so that no square underflows
        scaled = weighted / torch.where(scale > 0, scale, 1.0)
        squares = scaled.square().sum(1).sqrt()
        ratios = torch.where(squares > 0, scaled.sum(1).abs() / squares, 0.0)
        place = int(ratios.argmax())
        mean = float(errors[place].sum()) / max(1, int(counts[place]))
        yield Lean(float(ratios[place]), what, rank, mean, int(counts[place]))
