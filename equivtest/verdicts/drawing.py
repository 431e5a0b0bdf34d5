"""The elements of a small wrong tensor: which rank holds which of them, and which are wrong."""

from __future__ import annotations

import msgspec

MOST_DRAWN = 600
"""Elements of all ranks together, beyond which a tensor is not drawn."""


class HeldElements(msgspec.Struct, frozen=True):
    """The elements of a tensor on one rank, by their row-major index in the global tensor.

    Attributes:
        rank: None for the sum of the operands of all ranks.
        elements: All that the rank holds, without padding.
        wrong: The wrong ones among them.
    """

    rank: int | None
    elements: tuple[int, ...]
    wrong: tuple[int, ...]


class Drawing(msgspec.Struct, frozen=True):
    """A tensor, and what each rank holds of it."""

    tensor: str
    layout: str
    shape: tuple[int, ...]
    ranks: tuple[HeldElements, ...]
