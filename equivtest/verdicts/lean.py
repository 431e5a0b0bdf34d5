"""Detects errors that lean to one side, on real data with rounding to nearest.

Each element may be within its bound although all elements are too large. An average error of half an ulp in one
direction does not come from rounding to nearest. Let errors e_i be independent and prefer a sign by no more than b: for
every size of e_i, the probabilities of e_i and -e_i differ by at most b. Then for any weights c_i

    P( |sum c_i e_i| >= lam sqrt(sum (c_i e_i)**2) + b sum |c_i e_i| ) <= 2 exp(-lam**2 / 2),

for errors of any sizes, known or unknown. With lam = limits.LEAN = 9 the right side is 6e-18 for each sum. If at most
81 errors are not zero, the term with lam alone exceeds |sum c_i e_i|, so such sums are never judged.

The errors of a correct subject may lean a little too, at most by b. The density of a value v changes between two
neighbouring numbers of the dtype, so v is rounded down somewhat more, or less, often than up. The distance of the two
numbers is at most 2**-7 v in bfloat16, and smaller in all other dtypes. If v is about normal with the standard
deviation sigma, the lean is at most 2**-7 (v / sigma)**2, and on average 2**-7. b = limits.LEAN_SKEW is eight times
this average. Errors that always go to one side have b = 1.

The sums go over the whole tensor, each row, each column and each shard, with three weights each:
- 1, which shows a number added to every element;
- the right values, which show a factor that is slightly off;
- the signs of the right values divided by the allowed errors, which show truncation toward zero. With these weights
  errors of large and of small elements count alike, so that some 130 errors are enough.

Replicas count once, because the same error on every rank is one error. The independence of errors is an assumption: the
errors of one row share operands, but they share no rounding. In float64 an error includes the error of the reference
itself, which rounds to nearest too.

The judgement leaves out tensors and elements whose errors are not independent or not symmetric:
- tensors that the oracle does not declare symmetric (`ExpectedTensor.is_symmetric`), for one of three reasons.
  First, the backend does not round to nearest. Second, many elements share one rounding, such as that of bias / w,
  which is added in every row, or that of 1 / w in an average. Third, the elements are sums of few products. In 16 bits,
  products with one factor a little above a power of two are rounded down more often than up, because small significands
  are more frequent than large significands. But sums of few numbers, such as the ranks' operands of an all_reduce, are
  judged. Such a sum loses the last bits of one operand, which do not depend on the sum's place between two numbers;
- tensors with a partial layout, because the judgement and not the subject adds the operands;
- elements with an infinite allowed error, because all such elements may have overflowed in one direction.

Source: Hoeffding's inequality for random signs, given the sizes |e_i|, after the signs' means are subtracted; these
means contribute at most b sum |c_i e_i|.  De la Pena, Lai and Shao, Self-Normalized Processes, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from equivtest.base import limits
from equivtest.layout import Layout, flat_axis, is_partial, replicas
from equivtest.oracle.expected import ExpectedTensor
from equivtest.tensors import Placed
from equivtest.verdicts.elements import Part, parts_of
from equivtest.verdicts.verdict import Mismatch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Lean:
    """A weighted sum of errors.

    `ratio` is (|sum| - LEAN_SKEW * S) / R. S is the sum of the absolute weighted errors, and R is the root of the sum
    of their squares.
    """

    ratio: float
    what: str
    rank: int
    mean: float
    num_errors: int


def judge_lean(
    name: str, expected: ExpectedTensor, answers: Mapping[int, Placed], mesh_shape: Shape
) -> Mismatch | None:
    """Returns a mismatch for the sum of errors that leans most to one side, if its ratio is at least limits.LEAN.

    The caller has checked shapes and dtypes.
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
        actual=f"errors mostly on one side of zero, by {worst.mean:.2g} on average",
        global_shape=tuple(expected.value.shape),
        layout=str(layout),
        derivation=(
            f"|sum of errors|, less {limits.LEAN_SKEW:g} of their sizes, is {worst.ratio:.1f} times the root of the "
            f"sum of their squares, but {limits.LEAN:g} times is allowed: rounding to nearest exceeds that with "
            f"probability {2 * math.exp(-(limits.LEAN**2) / 2):.0e}"
        ),
        extent=f"{worst.num_errors} errors of {worst.what}",
    )


def _distinct(parts: list[Part], layout: Layout, mesh_shape: Shape) -> list[Part]:
    """Returns one part of each group of replicas, so that no error counts twice. Leaves out empty parts."""
    first = {group[0] for group in replicas(layout, mesh_shape)}
    return [part for part in parts if part.rank in first and part.actual.numel()]


def _leans(parts: list[Part], expected: ExpectedTensor, layout: Layout) -> Iterator[Lean]:
    whole, right = torch.zeros_like(expected.value), expected.value
    for part in parts:
        errors = torch.where(part.allowed.isfinite(), part.actual - part.expected, 0.0).nan_to_num()
        if len(parts) > 1:
            shard = _rows(errors, part.expected, part.allowed, width=errors.numel())
            yield from _sums(shard, f"rank {part.rank}'s shard", part.rank)
        if flat_axis(layout) is None:
            whole[tuple(slice(start, start + size) for start, size in zip(part.start, errors.shape, strict=True))] = (
                errors
            )
        else:
            whole.view(-1)[part.start[0] : part.start[0] + errors.numel()] = errors
    allowed = torch.zeros_like(right) if expected.allowed is None else expected.allowed
    yield from _sums(_rows(whole, right, allowed, width=right.numel()), "the whole tensor", 0)
    if right.dim() > 1:
        rows = _rows(whole, right, allowed, width=right.shape[-1])
        yield from _sums(rows, "one row", 0)
        yield from _sums(rows.mT, "one column", 0)


def _rows(errors: torch.Tensor, right: torch.Tensor, allowed: torch.Tensor, *, width: int) -> torch.Tensor:
    return torch.stack([errors, right, allowed]).reshape(3, -1, width or 1)


def _sums(rows: torch.Tensor, what: str, rank: int) -> Iterator[Lean]:
    """Yields, for each of the three weights of the module's docstring, the row whose weighted sum leans most.

    Args:
        rows: Errors, right values and allowances, stacked in the shape (3, number of rows, width).
        what: Description of a row, for the message.
    """
    errors, right, allowed = rows
    if not errors.numel():
        return
    counts = (errors != 0).sum(1)
    signs = torch.where(allowed > 0, right.sign() / allowed, 0.0)
    for weighted in (errors, errors * right, errors * signs):
        scale = weighted.abs().amax(1, keepdim=True)  # so that no square underflows
        scaled = weighted / torch.where(scale > 0, scale, 1.0)
        squares = scaled.square().sum(1).sqrt()
        beyond = (scaled.sum(1).abs() - limits.LEAN_SKEW * scaled.abs().sum(1)).clamp(min=0)
        ratios = torch.where(squares > 0, beyond / squares, 0.0)
        place = int(ratios.argmax())
        mean = float(errors[place].sum()) / max(1, int(counts[place]))
        yield Lean(float(ratios[place]), what, rank, mean, int(counts[place]))
