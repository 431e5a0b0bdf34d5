"""Collects the conclusions on the submodules of modules that are judged by parts, as a tree for the report's page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

NAME = re.compile(r"(?:(?:step|micro)\d+\.)?(?P<back>grad\.)?boundary\.(?P<path>[^#:[]*)(?:#\d+)?(?P<what>:[^[]*)?")
"""Pattern of a boundary tensor's name: 'step2.grad.boundary.layers.1.mlp#2:input[0]' is an input of 'layers.1.mlp'."""

HELD, OPEN, WRONG, BEGINS = "held", "open", "wrong", "begins"


class Shown(NamedTuple):
    """One cell of the report's table of submodules, with a kind (HELD, OPEN, WRONG or BEGINS) and a margin as text."""

    kind: str
    text: str


@dataclass
class Cell:
    """The conclusions on one submodule in the forward or in the backward, over all draws of values.

    Attributes:
        margin: The largest margin (error / allowed error) among the tensors with a conclusion.
        begins: Number of draws in which this submodule is the first wrong submodule.
    """

    margin: float = 0.0
    num: int = 0
    num_open: int = 0
    begins: int = 0

    def shown(self) -> Shown:
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
    """The tree of submodules, as path -> (forward cell, backward cell).

    A path is the submodule's name, split at its dots. A last part that begins with ':' stands for the submodule's
    inputs, or for a function of torch that it calls.
    """

    cells: dict[tuple[str, ...], tuple[Cell, Cell]] = field(default_factory=dict)

    def add(self, parts: Mapping[str, float | None], begins: str) -> None:
        """Counts the conclusions of one draw.

        Args:
            parts: Boundary tensor of a submodule -> its margin, or None if there is no conclusion.
            begins: The first wrong boundary tensor, or ''.
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
        """Returns (depth, name, forward, backward) of each node.  A direction without a judgement is None."""
        order = {way: place for place, way in enumerate(self.cells)}
        ways = sorted(self.cells, key=lambda way: [order[way[:length]] for length in range(1, len(way) + 1)])
        found = []
        for way in ways:
            forward, backward = (cell.shown() if cell.num else None for cell in self.cells[way])
            found.append((len(way) - 1, way[-1], forward, backward))
        return found
