"""Compares one tensor on every rank, element by element, with the oracle's tensor.

Each rank's tensor is compared with the oracle's slice under the layout that the rank reports. Under a partial layout
the ranks' operands are reduced first. The subject gathers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from equivtest.cases.case import in_one_step
from equivtest.layout import (
    Layout,
    coordinate_of,
    divided_dim,
    flat_axis,
    flat_bounds,
    is_partial,
    local_box,
    local_shape,
)
from equivtest.oracle.expected import ExpectedTensor, says_nothing
from equivtest.tensors import Placed, assemble, assemble_listed, dtype_name
from equivtest.verdicts.drawing import MOST_DRAWN, Drawing, HeldElements
from equivtest.verdicts.patterns import Elements, pattern_of
from equivtest.verdicts.verdict import Mismatch

Shape = tuple[int, ...]
BY_ELEMENTS = "by elements"
"""Name in messages of a layout that is a list of elements."""


@dataclass(frozen=True)
class Part:
    """The actual and the expected elements of one rank, without padding.

    Attributes:
        actual, expected, allowed: Three float64 tensors of one shape. This is the shape of the shard, or 1-D for a
            `Flat` layout.
        start: Global index of the first element: one number per dim, or a single number for a `Flat` layout.
        flushed_below: Magnitude below which a zero counts as equal to the right value: see `ExpectedTensor`.
        indices: Index of each element into the flattened global tensor, if the rank lists them; then `start` is empty.
    """

    rank: int
    actual: torch.Tensor
    expected: torch.Tensor
    allowed: torch.Tensor
    start: tuple[int, ...]
    flushed_below: float = 0.0
    indices: torch.Tensor | None = None

    @property
    def ratio(self) -> torch.Tensor:
        """Error divided by the allowed error.

        The ratio is 0 if the elements are equal or the allowed error is infinite. In any other case, it is infinite if
        the allowed error is 0 or if one of the two elements is NaN.
        """
        error = (self.actual - self.expected).abs()
        equal = (self.actual == self.expected) | (self.actual.isnan() & self.expected.isnan())
        equal |= (self.actual == 0) & (self.expected.abs() < self.flushed_below)
        ratio = (error / self.allowed).nan_to_num(nan=math.inf, posinf=math.inf)
        return torch.where(equal | (self.allowed == math.inf), 0.0, ratio)


def shape_mismatch(
    name: str, expected: ExpectedTensor, answers: Mapping[int, Placed | None], mesh_shape: Shape
) -> Mismatch | None:
    """Describes the first rank whose tensor is missing, or whose shape or dtype differs from the expected shard's.

    If there is no such rank, describes a partial layout that differs between ranks, or an element that no rank holds.
    Returns None if there is no such layout or element either.
    """
    global_shape = tuple(expected.value.shape)
    for rank, placed in answers.items():
        if placed is None:
            return _missing(name, rank, expected)
        try:
            is_listed = placed.indices is not None
            shape = (
                tuple(placed.local.shape) if is_listed else local_shape(global_shape, placed.layout, mesh_shape, rank)
            )
        except ValueError as error:
            return Mismatch(name, rank, expected=str(expected.layout), actual=f"{placed.layout}: {error}")
        if placed.global_shape not in (None, global_shape):
            right, actual = f"global {global_shape}", f"global {placed.global_shape}"
        elif placed.local.shape != shape or not _is_dtype_right(placed.local.dtype, expected):
            right = f"local {shape} {expected.dtype}"
            actual = f"local {tuple(placed.local.shape)} {dtype_name(placed.local.dtype)}"
        else:
            continue
        layout, way_out = str(placed.layout), _fitted(name, placed, expected, shape, mesh_shape, rank)
        return Mismatch(
            name, rank, expected=right, actual=actual, layout=layout, global_shape=global_shape, way_out=way_out
        )
    return _mixed_operands(name, answers) or (
        None if expected.may_be_none else _unheld(name, answers, mesh_shape, global_shape)
    )


def _is_dtype_right(actual: torch.dtype, expected: ExpectedTensor) -> bool:
    """True if the subject's tensor has the expected dtype, or a wider dtype that `takes_wider` allows.

    A program with a wider dtype rounds less, so it stays within the same bound.  A narrower dtype rounds once more than
    the bound counts.

    Source: torch.promote_types (2.13.0), which gives the smallest dtype that holds both.
    """
    right: torch.dtype = getattr(torch, expected.dtype)
    if not expected.takes_wider or actual.is_complex != right.is_complex:
        return actual == right
    is_whole = not (actual.is_floating_point or actual.is_complex)
    return is_whole or torch.promote_types(actual, right) == actual


def _missing(name: str, rank: int, expected: ExpectedTensor) -> Mismatch:
    right, actual = "a tensor", "none: the subject did not return it"
    way_out = "return a DTensor, or Placed(local tensor, layout), under each name of case.answer_names()"
    if (plain := in_one_step(name)).startswith("grad."):
        what = plain.removeprefix("grad.")
        actual = f"none: on this rank .grad of {what} is None after the backward"
        way_out = (
            f"the unsharded computation has a gradient: use {what} itself in the forward, not a copy or the result of "
            "detach(); leave requires_grad True, and keep .grad"
        )
        if expected.is_zero:
            right = "zeros: the unsharded computation has a gradient, and each of its elements is 0"
            way_out = f"leave zeros in .grad, or accept either: Judge(zero_or_none=({what!r},))"
    shape = tuple(expected.value.shape)
    return Mismatch(name, rank, expected=right, actual=actual, global_shape=shape, way_out=way_out)


def _fitted(name: str, placed: Placed, expected: ExpectedTensor, shape: Shape, mesh_shape: Shape, rank: int) -> str:
    """Explains how to mend a tensor with a wrong local shape or dtype. Returns '' if the remedy is unknown."""
    local = tuple(placed.local.shape)
    dim = divided_dim(shape, local, mesh_shape, rank) if shape == tuple(expected.value.shape) else None
    if dim is not None:
        is_parameters = in_one_step(name).startswith(("param.", "grad."))
        also = ", or return a DTensor, which knows that it is a part" if is_parameters else ""
        return f"{local} is this rank's part of {shape} divided along dim {dim}: gather it{also}"
    also = ", or in a wider dtype" if expected.takes_wider else ""
    return f"return it in {expected.dtype}, as the unsharded computation does{also}" if local == shape else ""


def _unheld(name: str, answers: Mapping[int, Placed | None], mesh_shape: Shape, global_shape: Shape) -> Mismatch | None:
    """Describes the first element that no rank holds, for ranks that list the indices of their elements."""
    present = {rank: placed for rank, placed in answers.items() if placed is not None}
    if all(placed.indices is None for placed in present.values()):
        return None
    is_held = assemble_listed(present, global_shape, mesh_shape)[1] >= 0
    if bool(is_held.all()):
        return None
    flat = int(is_held.reshape(-1).int().argmin())
    num = int((~is_held).sum())
    return Mismatch(
        name,
        next(iter(present)),
        expected="every element on some rank",
        actual=f"{num} of {is_held.numel()} elements are on no rank, the first is {unravel(flat, global_shape)}",
        layout=BY_ELEMENTS,
        global_shape=global_shape,
        way_out="keep each element on some rank; if a rank has it already, report its place by Judge(placed=)",
    )


def _mixed_operands(name: str, answers: Mapping[int, Placed | None]) -> Mismatch | None:
    """Describes the first rank whose layout differs from the first rank's, if any layout is partial.

    Returns None if no layout is partial, because there are no operands to add. Returns None too if all layouts are
    equal, because the operands can be added.
    """
    layouts = {rank: placed.layout for rank, placed in answers.items() if placed is not None}
    if not any(is_partial(layout) for layout in layouts.values()):
        return None
    first, right = next(iter(layouts.items()))
    other = next((rank for rank, layout in layouts.items() if layout != right), None)
    if other is None:
        return None
    return Mismatch(name, other, expected=f"{right} as on rank {first}", actual=str(layouts[other]))


def judge_values(
    name: str, expected: ExpectedTensor, answers: Mapping[int, Placed], mesh_shape: Shape
) -> tuple[Mismatch | None, float]:
    """Returns (mismatch, quotient) for the element whose error is largest in relation to its allowed error.

    All ranks' elements are compared. The quotient is this element's error divided by its allowed error. The mismatch is
    None if no element is wrong, which means that the quotient is at most 1. The caller has checked shapes and dtypes.
    """
    parts = parts_of(expected, answers, mesh_shape)
    if all(torch.equal(part.actual, part.expected) for part in parts):  # the usual case, without the arithmetic
        return None, 0.0
    ratios = {part.rank: part.ratio for part in parts}
    worst = {rank: float(ratio.max()) for rank, ratio in ratios.items() if ratio.numel()}
    margin = max(worst.values(), default=0.0)
    if margin <= 1:
        return None, margin
    chosen = next(part for part in parts if worst.get(part.rank) == margin)
    wrong = {part.rank: int((ratios[part.rank] > 1).sum()) for part in parts}
    layout = answers[chosen.rank].layout
    found = _describe(name, expected, chosen, layout, wrong, pattern_of(parts_wrong(parts)))
    return replace(found, drawing=_drawing(found, layout, parts, ratios)), margin


def _drawing(found: Mismatch, layout: Layout, parts: list[Part], ratios: Mapping[int, torch.Tensor]) -> Drawing | None:
    """Returns a picture of the elements that each rank holds, or None if there are too many elements."""
    assert found.global_shape is not None
    if sum(part.actual.numel() for part in parts) > MOST_DRAWN or math.prod(found.global_shape) > MOST_DRAWN:
        return None
    ranks = []
    for part in parts:
        places = _places(part, found.global_shape)
        is_wrong = (ratios[part.rank] > 1).reshape(-1)
        rank = None if is_partial(layout) else part.rank
        ranks.append(HeldElements(rank, tuple(places.tolist()), tuple(places[is_wrong].tolist())))
    return Drawing(found.tensor, found.layout, found.global_shape, tuple(ranks))


def _places(part: Part, shape: Shape) -> torch.Tensor:
    """Returns a 1-D tensor with the row-major index, in the global tensor, of each element of a part."""
    if part.indices is not None:
        return part.indices.reshape(-1)
    if len(part.start) != len(shape):  # a flat partition
        return torch.arange(part.start[0], part.start[0] + part.actual.numel())
    window = tuple(slice(start, start + size) for start, size in zip(part.start, part.actual.shape, strict=True))
    return torch.arange(math.prod(shape)).reshape(shape)[window].reshape(-1)


def parts_wrong(parts: list[Part]) -> Elements:
    """Returns three 1-D tensors for each rank with wrong elements: (actual, expected, allowed)."""
    found = [tuple(each[part.ratio > 1] for each in (part.actual, part.expected, part.allowed)) for part in parts]
    return [(actual, expected, allowed) for actual, expected, allowed in found if actual.numel()]


def is_too_wide(expected: ExpectedTensor) -> bool:
    """True if the allowed error is so large that an error within it proves nothing: see `says_nothing`."""
    is_wide = expected.allowed is not None and says_nothing(expected.value, expected.allowed, expected.scale)
    return is_wide or expected.is_open


def is_near(expected: ExpectedTensor, answers: Mapping[int, Placed], mesh_shape: Shape) -> bool:
    if expected.resolution is None:
        return False
    near = replace(expected, allowed=expected.resolution)
    return all(not bool((part.ratio > 1).any()) for part in parts_of(near, answers, mesh_shape))


def parts_of(expected: ExpectedTensor, answers: Mapping[int, Placed], mesh_shape: Shape) -> list[Part]:
    """Returns the elements of each rank, or one part with the reduced global tensor for a partial layout."""
    value = expected.value
    allowed = torch.zeros_like(value) if expected.allowed is None else expected.allowed
    layout = next(iter(answers.values())).layout
    if is_partial(layout):
        operands = {rank: placed.local.double() for rank, placed in answers.items()}
        whole = assemble(operands, tuple(value.shape), layout, mesh_shape).tensor
        return [Part(0, whole, value, allowed, (0,) * value.dim())]
    parts = (_part(rank, placed, value, allowed, mesh_shape) for rank, placed in answers.items())
    return [replace(part, flushed_below=expected.flushed_below) for part in parts]


def _part(rank: int, placed: Placed, value: torch.Tensor, allowed: torch.Tensor, mesh_shape: Shape) -> Part:
    if (indices := placed.indices) is not None:
        right, bound = value.reshape(-1)[indices], allowed.reshape(-1)[indices]
        return Part(rank, placed.local.double(), right, bound, (), indices=indices)
    axis = flat_axis(placed.layout)
    actual = placed.local.double()
    if axis is None:
        box = local_box(tuple(value.shape), placed.layout, mesh_shape, rank)
        window = tuple(slice(start, stop) for start, stop in box)
        return Part(rank, actual, value[window], allowed[window], tuple(start for start, _ in box))
    index = coordinate_of(rank, mesh_shape)[axis]
    start, stop, _ = flat_bounds(value.numel(), placed.layout.placements[axis], mesh_shape[axis], index)
    flat_value, flat_allowed = value.reshape(-1)[start:stop], allowed.reshape(-1)[start:stop]
    return Part(rank, actual[: stop - start], flat_value, flat_allowed, (start,))


def _describe(
    name: str, expected: ExpectedTensor, part: Part, layout: Layout, wrong: dict[int, int], pattern: str
) -> Mismatch:
    flat = int(part.ratio.reshape(-1).argmax())
    local_index = unravel(flat, tuple(part.actual.shape))
    global_shape = tuple(expected.value.shape)
    if part.indices is not None:
        global_index = unravel(int(part.indices.reshape(-1)[flat]), global_shape)
    elif len(part.start) != len(global_shape):  # a flat partition
        global_index = unravel(part.start[0] + flat, global_shape)
    else:
        global_index = tuple(start + place for start, place in zip(part.start, local_index, strict=True))
    right, actual = (float(tensor.reshape(-1)[flat]) for tensor in (part.expected, part.actual))
    ranks = [rank for rank, count in wrong.items() if count]
    extent = f"{wrong[part.rank]} of {part.actual.numel()} local elements; {_ranks_in_words(ranks, len(wrong))}"
    if is_partial(layout):
        extent = f"{wrong[part.rank]} of {part.actual.numel()} elements of all ranks' operands, reduced"
    return Mismatch(
        name,
        part.rank,
        expected=f"{right:.9e}",
        actual=f"{actual:.9e}",
        local_index=local_index,
        global_index=global_index,
        global_shape=global_shape,
        layout=str(layout) if part.indices is None else BY_ELEMENTS,
        error=abs(actual - right),
        allowed=float(part.allowed.reshape(-1)[flat]),
        derivation=expected.derivation,
        extent=extent,
        pattern=pattern,
    )


def unravel(flat: int, shape: Shape) -> Shape:
    index = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))


def _ranks_in_words(ranks: list[int], num_ranks: int) -> str:
    if len(ranks) == num_ranks:
        return "on every rank" if num_ranks > 1 else "on the only rank"
    if len(ranks) == 1:
        return f"rank {ranks[0]} only"
    return f"ranks {', '.join(map(str, ranks))}"
