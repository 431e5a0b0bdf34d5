"""Describes a small wrong tensor: the elements that each rank holds, and which elements are wrong."""

from __future__ import annotations

import math

import msgspec

MOST_DRAWN = 600
"""Elements of all ranks together, beyond which a tensor is not drawn."""


class HeldElements(msgspec.Struct, frozen=True):
    """The elements of a tensor on one rank, by their row-major index in the global tensor.

    Attributes:
        rank: The rank that holds the elements. None if the elements are the sum of the operands of all ranks.
        elements: Indices of all elements that the rank holds, without padding.
        wrong: Indices of the wrong elements.
    """

    rank: int | None
    elements: tuple[int, ...]
    wrong: tuple[int, ...]


class Drawing(msgspec.Struct, frozen=True):
    """A tensor, and the elements that each rank holds."""

    tensor: str
    layout: str
    shape: tuple[int, ...]
    ranks: tuple[HeldElements, ...]


def is_drawable(drawing: Drawing) -> bool:
    """True if the tensor is small enough to draw, and the listed elements fit it."""
    if max(len(drawing.shape), len(drawing.ranks)) > MOST_DRAWN or min(drawing.shape, default=1) < 1:
        return False
    num_elements = math.prod(drawing.shape)
    indices = [index for held in drawing.ranks for index in held.elements]
    if max(num_elements, len(indices)) > MOST_DRAWN or not all(0 <= index < num_elements for index in indices):
        return False
    return all(
        len(held.wrong) <= len(held.elements) and set(held.wrong) <= set(held.elements) for held in drawing.ranks
    )
