"""Compares the bits of one tensor on every rank with the bits of the oracle's tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from equivtest.layout import coordinate_of, flat_axis, flat_bounds, is_partial, local_box
from equivtest.oracle.expected import ExpectedTensor
from equivtest.tensors import Placed, as_bits, dtype_name, slice_local
from equivtest.verdicts.elements import unravel
from equivtest.verdicts.verdict import Mismatch

Shape = tuple[int, ...]
Excuse = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function (actual, expected) -> mask of the elements that are right although their bits differ."""


def bits_mismatch(
    name: str, expected: ExpectedTensor, answers: Mapping[int, Placed], mesh_shape: Shape, excuse: Excuse
) -> Mismatch | None:
    """Describes the first element with wrong bits, on any rank. Returns None if no element has wrong bits.

    Skips padding, elements that `excuse` excuses, flushed numbers, and tensors that other claims judge.
    """
    assert expected.bits is not None
    wrong: dict[int, int] = {}
    first: Mismatch | None = None
    for rank, placed in answers.items():
        pair = _pair(expected.bits, placed, mesh_shape, rank)
        if pair is None or torch.equal(as_bits(pair[0]), as_bits(pair[1])):
            continue
        excused = excuse(*pair) | where_flushed(*pair, expected.flushed_below)
        differing = (as_bits(pair[0]) != as_bits(pair[1])) & ~excused
        wrong[rank] = int(differing.sum())
        if first is None and wrong[rank]:
            flat = int(differing.reshape(-1).int().argmax())
            first = _describe(name, expected, placed, pair, (rank, flat), mesh_shape)
    if first is None:
        return None
    counts = ", ".join(f"{count} on rank {rank}" for rank, count in wrong.items() if count)
    return replace(first, extent=f"elements with other bits: {counts}")


def form_mismatch(name: str, first: Mapping[int, Placed], again: Mapping[int, Placed | None]) -> Mismatch | None:
    """Describes the first rank whose tensor in the second run is missing, or has another layout, shape or dtype."""
    for rank, once in first.items():
        twice = again.get(rank)
        if twice is None:
            return Mismatch(name, rank, expected="a tensor, as the first time", actual="none")
        left, right = once.local, twice.local
        if once.layout != twice.layout or left.shape != right.shape or left.dtype != right.dtype:
            return Mismatch(name, rank, expected=f"{_form(once)} as the first time", actual=_form(twice))
    return None


def repeat_mismatch(name: str, first: Mapping[int, Placed], again: Mapping[int, Placed]) -> Mismatch | None:
    """Describes the first element, on any rank, whose bits differ in the second run."""
    for rank, once in first.items():
        left, right = once.local, again[rank].local
        differing = (as_bits(left) != as_bits(right)).reshape(-1)
        if bool(differing.any()):
            flat = int(differing.int().argmax())
            return Mismatch(
                name,
                rank,
                expected=f"{in_words(left, flat)} as the first time",
                actual=in_words(right, flat),
                local_index=unravel(flat, tuple(left.shape)),
                layout=str(once.layout),
                extent=f"{int(differing.sum())} of {left.numel()} local elements of rank {rank}",
            )
    return None


def _form(placed: Placed) -> str:
    return f"local {tuple(placed.local.shape)} {dtype_name(placed.local.dtype)} under {placed.layout}"


def in_words(tensor: torch.Tensor, flat: int) -> str:
    mask = (1 << 8 * tensor.element_size()) - 1
    bits = int(as_bits(tensor).reshape(-1)[flat]) & mask
    return f"{float(tensor.detach().reshape(-1)[flat]):.9e} (bits {bits:#0{2 + 2 * tensor.element_size()}x})"


def no_excuse(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(expected, dtype=torch.bool)


def where_both_are_zero(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Returns the mask of elements that are zero in both tensors, of either sign: see `ExpectedTensor.is_sum`."""
    return (expected == 0) & (actual == 0)


def where_zeros_were_added(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Returns the mask of elements in which -0.0 became +0.0, or a NaN became another NaN.

    Source: IEEE 754-2019 section 6.3: the sum of zeros of unlike sign is +0 when rounded to nearest;
    section 6.2: an operation on a signalling NaN gives a quiet one, whose payload is not prescribed.
    """
    lost_sign = (expected == 0) & (actual == 0) & expected.signbit()
    return lost_sign | (expected.isnan() & actual.isnan())


def where_flushed(actual: torch.Tensor, expected: torch.Tensor, below: float) -> torch.Tensor:
    """Returns the mask of numbers that a backend flushed to zero.

    Such a number is nearer to zero than `below`, and the actual element is +0.0 or a zero with the number's sign.

    Source: LLVM Language Reference, denormal-fp-math: "positive-zero" and "preserve-sign".
    """
    is_right_zero = (actual == 0) & (~actual.signbit() | expected.signbit())
    return (expected.abs() < below) & is_right_zero


def _pair(bits: torch.Tensor, placed: Placed, mesh_shape: Shape, rank: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns (actual elements of the rank, expected elements of the rank), both without padding.

    Returns None if the rank's tensor has a partial layout, or another shape or dtype than the expected elements.
    """
    if is_partial(placed.layout) or placed.local.dtype != bits.dtype:
        return None
    try:
        right = slice_local(bits, placed.layout, mesh_shape, rank)
    except ValueError:  # no such shard
        return None
    if right.shape != placed.local.shape:
        return None
    flat_range = _flat_range(bits, placed, mesh_shape, rank)
    if flat_range is None:
        return placed.local, right
    num_held = flat_range[1] - flat_range[0]
    return placed.local[:num_held], right[:num_held]


def _flat_range(bits: torch.Tensor, placed: Placed, mesh_shape: Shape, rank: int) -> tuple[int, int] | None:
    """Returns the indices (start, stop) of the rank's elements in the flattened tensor."""
    axis = flat_axis(placed.layout)
    if axis is None:
        return None
    index = coordinate_of(rank, mesh_shape)[axis]
    start, stop, _ = flat_bounds(bits.numel(), placed.layout.placements[axis], mesh_shape[axis], index)
    return start, stop


def _describe(
    name: str,
    expected: ExpectedTensor,
    placed: Placed,
    pair: tuple[torch.Tensor, torch.Tensor],
    place: tuple[int, int],
    mesh_shape: Shape,
) -> Mismatch:
    rank, flat = place
    assert expected.bits is not None
    global_shape = tuple(expected.bits.shape)
    local_index = unravel(flat, tuple(pair[0].shape))
    flat_range = _flat_range(expected.bits, placed, mesh_shape, rank)
    if flat_range is not None:
        global_index = unravel(flat_range[0] + flat, global_shape)
    else:
        box = local_box(global_shape, placed.layout, mesh_shape, rank)
        global_index = tuple(start + step for (start, _), step in zip(box, local_index, strict=True))
    return Mismatch(
        name,
        rank,
        expected=in_words(pair[1], flat),
        actual=in_words(pair[0], flat),
        local_index=local_index,
        global_index=global_index,
        global_shape=global_shape,
        layout=str(placed.layout),
    )
