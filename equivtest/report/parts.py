"""What was concluded of each part of modules that are judged part by part: a tree of names, for the report's page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

NAME = re.compile(r"(?:(?:step|micro)\d+\.)?(?P<back>grad\.)?boundary\.(?P<path>[^#:[]*)(?:#\d+)?(?P<what>:[^[]*)?")
"""'step2.grad.boundary.layers.1.mlp#2:input[0]' is of the path 'layers.1.mlp', and of what it was handed."""

HELD, OPEN, WRONG, BEGINS = "held", "open", "wrong", "begins"


class Shown(NamedTuple):
    """A cell: one of the four above, and a margin."""

    kind: str
    text: str


@dataclass
class Cell:
    """What was concluded of one part in one direction, over all draws.

    Attributes:
        margin: The largest of those that were concluded.
        num, num_open: Tensors, and those about which nothing was concluded.
        begins: Draws in which it is the first that is wrong.
    """

    margin: float = 0.0
    num: int = 0
    num_open: int = 0
    begins: int = 0

    def shown(self) -> Shown:
        """As the page has it."""
        text = f"{self.margin:.2g}" if self.num > self.num_open else ""
        if self.begins:
            return Shown(BEGINS, f"begins here: {text}")
        if self.margin > 1:
            return Shown(WRONG, text)
        if self.num_open:
            return Shown(OPEN, f"{text} {self.num_open} of {self.num} open".strip())
        return Shown(HELD, text)


@dataclass
class PartTree:
    """Cells by the names on the way to a part, what it is handed or calls beneath it, and by direction."""

    cells: dict[tuple[str, ...], tuple[Cell, Cell]] = field(default_factory=dict)

    def add(self, parts: Mapping[str, float | None], begins: str) -> None:
        """Counts one draw.

        Args:
            parts, begins: As of `equivtest.report.handover.Record`.
        """
        for name, margin in parts.items():
            match = NAME.match(name)
            assert match, name
            way = (*filter(None, match["path"].split(".")), *filter(None, [match["what"]]))
            for length in range(1, len(way) + 1):
                self.cells.setdefault(way[:length], (Cell(), Cell()))
            cell = self.cells[way][bool(match["back"])]
            cell.num += 1
            cell.num_open += margin is None
            cell.begins += name == begins
            cell.margin = max(cell.margin, margin or 0.0)

    def rows(self) -> list[tuple[int, str, Shown | None, Shown | None]]:
        """Depth, name, forward and backward of each part, one beneath the other, None where nothing was judged."""
        order = {way: place for place, way in enumerate(self.cells)}
        ways = sorted(self.cells, key=lambda way: [order[way[:length]] for length in range(1, len(way) + 1)])
        found = []
        for way in ways:
            forward, backward = (cell.shown() if cell.num else None for cell in self.cells[way])
            found.append((len(way) - 1, way[-1], forward, backward))
        return found
