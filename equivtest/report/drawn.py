"""Draws the pictures of the report's page: the elements of a wrong tensor on each rank, and histograms of margins.

Each picture is a path of an inline SVG, which needs no other file, and a text for a screen reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from equivtest.report.margins import BINS, Margins
from equivtest.verdicts.drawing import Drawing, HeldElements, is_drawable

CELL, GAP = 16, 2  # of an element, in CSS pixels
LEFT, TOP = 34, 16  # room for the indices of rows and columns
MOST_INDICES = 40
"""If a picture has more rows or columns than this, it shows no indices."""
WRAP = 16
"""Number of elements in one row of the picture of a vector."""
MOST_NAMED = 8
"""Number of wrong elements that the text for a screen reader names."""
BAR, HEIGHT = 14, 26  # of a histogram, in CSS pixels


class RankPicture(NamedTuple):
    """One rank's elements in a grid of the global tensor.

    Attributes:
        outlines, right, wrong, crosses: Paths that draw all elements, the rank's right elements, the rank's wrong
            elements, and the crosses on the wrong elements.
        labels: (x, y, index) of rows and columns.
    """

    title: str
    text: str
    width: int
    height: int
    outlines: str
    right: str
    wrong: str
    crosses: str
    labels: tuple[tuple[int, int, str], ...]


def pictures_of(drawing: Drawing) -> list[RankPicture]:
    """Returns a picture for each rank, or [] for an invalid drawing, which only another program's log can contain."""
    return [_picture(drawing.shape, held) for held in drawing.ranks] if is_drawable(drawing) else []


def _picture(shape: tuple[int, ...], held: HeldElements) -> RankPicture:
    num_columns, elements = _columns_of(shape), range(math.prod(shape))
    num_rows = -(-len(elements) // num_columns)
    wrong = set(held.wrong)

    def path(chosen: Iterable[int], shape_of_cell: str, inset: int = 0) -> str:
        places = ((LEFT + e % num_columns * CELL + inset, TOP + e // num_columns * CELL + inset) for e in chosen)
        return "".join(f"M{x} {y}{shape_of_cell}" for x, y in places)

    side = CELL - GAP
    square = f"h{side}v{side}h-{side}z"
    named = [str(_index(element, shape)) for element in held.wrong[:MOST_NAMED]]
    more = f" and {len(held.wrong) - MOST_NAMED} more" if len(held.wrong) > MOST_NAMED else ""
    what = f"wrong: {', '.join(named)}{more}" if named else "none is wrong"
    title = "all ranks, reduced" if held.rank is None else f"rank {held.rank}"
    return RankPicture(
        title=title,
        text=f"{title}: {len(held.elements)} of {len(elements)} elements; {what}"
        if held.elements
        else f"{title}: none",
        width=LEFT + num_columns * CELL,
        height=TOP + num_rows * CELL,
        outlines=path(elements, square),
        right=path((e for e in held.elements if e not in wrong), square),
        wrong=path(held.wrong, square),
        crosses=path(held.wrong, "l6 6m0-6l-6 6", inset=4),
        labels=tuple(_labels(shape, num_rows, num_columns)),
    )


def _columns_of(shape: tuple[int, ...]) -> int:
    last = max(1, shape[-1]) if shape else 1
    return min(last, WRAP) if len(shape) == 1 else last


def _labels(shape: tuple[int, ...], num_rows: int, num_columns: int) -> Iterable[tuple[int, int, str]]:
    if shape and num_columns <= MOST_INDICES:
        yield from ((LEFT + c * CELL + CELL // 2 - 1, TOP - 5, str(c)) for c in range(num_columns))
    if num_rows <= MOST_INDICES and (len(shape) > 1 or num_rows > 1):
        for row in range(num_rows):
            text = str(row * num_columns) if len(shape) == 1 else ",".join(map(str, _index(row, shape[:-1])))
            yield LEFT // 2, TOP + row * CELL + CELL - 5, text


def _index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))


class Histogram(NamedTuple):
    text: str
    path: str


WIDTH = BAR * len(BINS)


def histogram_of(margins: Margins) -> Histogram:
    largest = max(margins.bins.values(), default=0)
    parts, words = [], []
    for place, power in enumerate(BINS):
        if number := margins.bins[power]:
            height = max(2, round(number / largest * (HEIGHT - 2)))
            parts.append(f"M{place * BAR + 1} {HEIGHT}v-{height}h{BAR - 2}v{height}z")
            words.append(f"{number:,} up to {2.0**power:.2g}")
    return Histogram("draws by margin: " + (", ".join(words) or "all are 0 or beyond 1"), "".join(parts))
