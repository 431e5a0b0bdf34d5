"""Assembles the ranks' tensors at a boundary inside a module, under a declared or an inferred layout.

A DTensor declares which part of the whole each rank has.  For a plain tensor the oracle infers the layout.  The oracle
tries all layouts of `_candidates`, and takes the first layout that fulfils three conditions. Under the layout the
ranks' tensors agree with the reference within its bound, the tensors are no operands of a sum, and all replicas have
the same bits. If no layout fulfils all three conditions, several layouts may agree with the reference, because a bound
may be wide. The oracle then takes the layout with the smallest errors.

Two arrangements have no layout. In the first, some slices along a dim are replicas, and all other slices are operands
of a sum. An example is a projection if all ranks use some of its results and each rank uses a part of the other
results. In the second arrangement, the slices of one dim are in any order, as in merged projections.

If the batch is divided, rows may move between ranks, as when each token goes to the rank of its expert.  Then the
oracle finds the rows of one rank's part of the batch among the rows of all ranks.

A wrong guess hides no fault. Whatever layout the oracle guesses, the value that it assembles agrees with the reference,
so the oracle judges all later parts from right values. The ranks continue from the values that they really have. If the
ranks' values are wrong, some later tensor of the ranks differs from the oracle's. At the latest this is an output, or
the gradient of an input or a parameter. For outputs and for these gradients the oracle guesses nothing, because the
case declares their layouts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from equivtest.layout import UNTOLD, Layout, Partial, Placement, Replicate, Shard, local_box, local_shape
from equivtest.oracle.held import Held, put_together
from equivtest.oracle.rounding import Bounded
from equivtest.programs.case import ModuleCase
from equivtest.tensors import Placed, assemble

Shape = tuple[int, ...]
LARGEST_MATCH = 2**22  # elements to compare at most when slices of a dim are matched
SMALLEST_ROW = 8  # elements that a row must have to be matched: shorter rows may agree by chance


class Whole(NamedTuple):
    """A global tensor that was assembled from the ranks' tensors.

    Attributes:
        value: The values of the tensor, in the ranks' dtype. If the value is a sum of operands, it is in float64.
        spread: A float64 tensor. For each element, it has the largest distance between `value` and a replica on another
            rank, or between `value` and another slice that fits. None if all distances are 0.
        magnitude: Sum of the operands' absolute values, if `value` is a sum of operands. Otherwise None.
        layout: The layout of the ranks' tensors. None if no layout describes them, for example if the slices of a dim
            are in any order.
        is_told: True if the ranks declare the layout, or if only one layout fits the shapes of the ranks' tensors.
            False if the oracle compared values to choose the layout.
    """

    value: torch.Tensor
    spread: torch.Tensor | None
    magnitude: torch.Tensor | None
    layout: Layout | None
    is_told: bool = True


HeldAt = Callable[[str, Bounded], Whole | None]
"""(name, right value) -> the ranks' tensor; None if some rank has no tensor, or no layout fits."""


def held_of_parts(case: ModuleCase, held: Held) -> list[HeldAt]:
    """Returns a function for each part of the batch, which assembles the ranks' tensors of that part."""
    return [held_by_ranks(case, held, part) for part in range(case.num_parts if case.is_divided else 1)]


def held_by_ranks(case: ModuleCase, held: Held, part: int) -> HeldAt:
    if not case.is_divided:
        return lambda name, right: _whole({rank: each.get(name) for rank, each in held.items()}, case.mesh_shape, right)
    ranks = case.ranks_of_part(part)
    if len(ranks) == 1:
        return lambda name, right: _own(
            {rank: _of_part(each.get(name)) for rank, each in held.items()}, ranks[0], right, case.rows_layout
        )

    def held_at(name: str, right: Bounded) -> Whole | None:
        placed = {number: _of_part(held[rank].get(name)) for number, rank in enumerate(ranks)}
        whole = _whole(placed, case.mesh_of_part, right)
        if whole is None or whole.layout is None:
            return whole
        return whole._replace(layout=case.stacked(whole.layout))

    return held_at


def _own(placed: Mapping[int, Placed | None], rank: int, right: Bounded, rows: Layout) -> Whole | None:
    """Assembles the tensor of `rank`, the only rank that ran a part of the batch.

    The result is None if that is impossible.

    The result is the rank's own tensor if that tensor agrees with the reference. If it does not agree, the rank may
    have exchanged rows with other ranks, as with the tokens of experts. The result then has rows of all ranks. If no
    exchange of rows agrees with the reference either, the result depends on the numbers of rows. If all ranks have the
    same number of rows, the result is the rank's own tensor, which will be judged wrong. If the numbers differ, the
    result is None.

    Args:
        rows: Layout of a tensor whose rows are divided among the ranks.
    """
    answers = {each: own for each, own in placed.items() if own is not None}
    own, is_even = answers.get(rank), len({each.local.shape for each in answers.values()}) == 1
    if own is not None and own.local.shape == right.value.shape:
        whole = Whole(own.local, None, None, rows)
        if is_agreed(whole, right):
            return whole if is_even else whole._replace(layout=None, is_told=False)
        if is_even:
            return _exchanged(answers, rank, right) or whole
    return _exchanged(answers, rank, right)


def _of_part(placed: Placed | None) -> Placed | None:
    """Removes the first dim of a rank's tensor, along which the global tensor stacks the parts of the batch."""
    return None if placed is None else replace(placed, local=placed.local[0])


def held_by_one(values: Mapping[str, torch.Tensor]) -> HeldAt:
    def held_at(name: str, right: Bounded) -> Whole | None:
        value = values.get(name)
        return None if value is None else Whole(value, None, None, Layout((Replicate(),)))

    return held_at


def _whole(placed: Mapping[int, Placed | None], mesh_shape: Shape, right: Bounded) -> Whole | None:
    answers = {rank: each for rank, each in placed.items() if each is not None}
    layouts = {each.layout for each in answers.values()}
    if len(answers) < len(placed) or len(layouts) != 1:
        return None
    if (layout := layouts.pop()) != UNTOLD:
        return _under(layout, answers, mesh_shape, right)
    candidates = [
        _under(layout, answers, mesh_shape, right)
        for layout in _candidates(answers, mesh_shape, tuple(right.value.shape))
    ]
    wholes = [whole._replace(is_told=1 in (len(candidates), len(answers))) for whole in candidates if whole is not None]
    agreeing = [whole for whole in wholes if is_agreed(whole, right)]
    certain = next((whole for whole in agreeing if whole.spread is None and whole.magnitude is None), None)
    if certain is not None:
        return certain
    sliced = _slice_by_slice(answers, mesh_shape, right)
    agreeing += [] if sliced is None else [sliced]
    nearest = min(agreeing or wholes, key=lambda whole: ratio_of(whole, right), default=None)
    return nearest if agreeing else _in_any_order(answers, right) or nearest


def _candidates(held: Mapping[int, Placed], mesh_shape: Shape, shape: Shape) -> Iterator[Layout]:
    """Yields the layouts of replicas, shards and operands of a sum that fit the ranks' tensors and the global shape."""
    choices: list[Placement] = [Replicate(), *map(Shard, range(len(shape))), Partial("sum")]
    for placements in itertools.product(choices, repeat=len(mesh_shape)):
        layout = Layout(placements)
        if all(local_shape(shape, layout, mesh_shape, rank) == each.local.shape for rank, each in held.items()):
            yield layout


def _under(layout: Layout, held: Mapping[int, Placed], mesh_shape: Shape, right: Bounded) -> Whole | None:
    """Assembles the ranks' tensors under a layout. The result is None if the tensors' shapes do not fit it."""
    placed = {rank: {"": Placed(each.local, layout)} for rank, each in held.items()}
    value = put_together(placed, "", tuple(right.value.shape), mesh_shape)
    if value is None:
        return None
    if any(isinstance(placement, Partial) for placement in layout.placements):
        sizes = {rank: each.local.double().abs() for rank, each in held.items()}
        magnitude = assemble(sizes, tuple(right.value.shape), layout, mesh_shape).tensor
        return Whole(value, None, magnitude, layout)
    return Whole(value, _spread(value, held, layout, mesh_shape), None, layout)


def _spread(value: torch.Tensor, held: Mapping[int, Placed], layout: Layout, mesh_shape: Shape) -> torch.Tensor | None:
    """Returns the distance between replicas for each element of the global tensor, or None if all are equal."""
    spread = torch.zeros(value.shape, dtype=torch.float64)
    for rank, each in held.items():
        box = local_box(tuple(value.shape), layout, mesh_shape, rank)
        window = tuple(slice(start, stop) for start, stop in box)
        apart = (each.local.double() - value[window].double()).abs().nan_to_num(nan=math.inf)
        apart = torch.where(each.local == value[window], 0.0, apart)  # equal infinities too
        spread[window] = torch.maximum(spread[window], apart)
    return spread if bool(spread.any()) else None


def ratio_of(whole: Whole, right: Bounded) -> float:
    error = (whole.value.double() - right.value).abs()
    ratio = torch.where((error == 0) | right.allowed.isinf(), 0.0, error / right.allowed)
    return float(ratio.nan_to_num(nan=math.inf).max()) if ratio.numel() else 0.0


def is_agreed(whole: Whole, right: Bounded) -> bool:
    """True if the values of all ranks, and so of all replicas, are within the bound.

    If one rank has the whole tensor and all other ranks have zeros, the tensor agrees as a sum and not as replicas.
    """
    error = (whole.value.double() - right.value).abs() + (0.0 if whole.spread is None else whole.spread)
    return bool(((error <= right.allowed) | right.allowed.isinf()).all())


def _in_any_order(held: Mapping[int, Placed], right: Bounded) -> Whole | None:
    """Assembles a tensor if, along some dim, each slice is on exactly one rank, in any order, as in merged projections.

    The result is None if there is no such dim.
    """
    for dim, size in enumerate(right.value.shape):
        slices = _slices(held, dim, tuple(right.value.shape))
        whole = None if slices is None or len(slices) != size else _matched(slices, dim, right)
        if whole is not None:
            return whole
    return None


def _exchanged(held: Mapping[int, Placed], rank: int, right: Bounded) -> Whole | None:
    """Assembles the tensor of a rank from slices of all ranks, by finding a slice for each of its rows.

    The result is None if no slices fit. It is None too if the rank's own slices suffice, because then nothing was
    exchanged.
    """
    shape = tuple(right.value.shape)
    for dim, size in enumerate(shape[:-1]):
        slices = _slices(held, dim, shape)
        if slices is None or not size or len(slices) < size or math.prod(shape) < size * SMALLEST_ROW:
            continue
        whole = _matched(slices, dim, right)
        own = _slices({rank: held[rank]}, dim, shape) if rank in held else None
        if whole is not None and (own is None or len(own) != size or _matched(own, dim, right) is None):
            return whole
    return None


def _slices(held: Mapping[int, Placed], dim: int, shape: Shape) -> torch.Tensor | None:
    """Stacks all slices along a dim, or returns None if they do not fit the whole tensor or are too many to compare."""
    shapes = [tuple(each.local.shape) for each in held.values()]
    others = shape[:dim] + shape[dim + 1 :]
    if not shapes or any(len(each) != len(shape) or each[:dim] + each[dim + 1 :] != others for each in shapes):
        return None
    if sum(each[dim] for each in shapes) * math.prod(shape) > LARGEST_MATCH:
        return None
    return torch.cat([each.local.movedim(dim, 0) for each in held.values()])


def _slice_by_slice(held: Mapping[int, Placed], mesh_shape: Shape, right: Bounded) -> Whole | None:
    """Assembles a tensor if, along one dim, each slice is either the same on all ranks or a sum over the ranks."""
    shape = tuple(right.value.shape)
    if len(mesh_shape) > 1 or any(tuple(each.local.shape) != shape for each in held.values()):
        return None
    operands = torch.stack([each.local.double() for each in held.values()])
    is_same = (operands == operands[0]).all(0) & ((operands[0] - right.value).abs() <= right.allowed)
    is_sum = (operands.sum(0) - right.value).abs() <= right.allowed
    for dim in range(len(shape)):
        others = [each for each in range(len(shape)) if each != dim]
        same, added = (each.all(others, keepdim=True) if others else each for each in (is_same, is_sum))
        if bool((same | added).all()):
            value = torch.where(same, operands[0], operands.sum(0))
            magnitude = torch.where(same, operands[0].abs(), operands.abs().sum(0))
            return Whole(value, None, magnitude, None, is_told=False)
    return None


def _matched(slices: torch.Tensor, dim: int, right: Bounded) -> Whole | None:
    """Matches each slice of `right` along a dim with a different slice of the ranks.

    The result is None if a slice has no match.

    Slices with the fewest candidates are matched first, each with its nearest candidate.  If several candidates are
    within the bound, any of them may be the right slice, so `spread` has the distance between them.
    """
    value, allowed = right.value.movedim(dim, 0), right.allowed.movedim(dim, 0)
    wide, number = slices.double(), math.prod(value.shape[1:])
    errors = [(wide - each).abs().reshape(len(slices), number) for each in value]
    fits = [(error <= bound.reshape(number)).all(1) for error, bound in zip(errors, allowed, strict=True)]
    free, places = torch.ones(len(slices), dtype=torch.bool), [0] * len(value)
    for row in sorted(range(len(value)), key=lambda row: int(fits[row].sum())):
        candidates = fits[row] & free
        if not bool(candidates.any()):
            return None
        furthest = errors[row].amax(1) if number else torch.zeros(len(slices), dtype=torch.float64)
        places[row] = int(furthest.where(candidates, torch.inf).argmin())
        free[places[row]] = False
    spread = torch.zeros(value.shape, dtype=torch.float64)
    for row, place in enumerate(places):
        spread[row] = (wide[fits[row]] - wide[place]).abs().amax(0).nan_to_num(nan=math.inf)
    found = slices[places].movedim(0, dim).contiguous()
    off = spread.movedim(0, dim).contiguous() if bool(spread.any()) else None
    return Whole(found, off, None, None, is_told=False)
