"""Where in a module an operation is: the submodule, and the line of the user's code, in the backward too.

Source: torch.autograd's sequence numbers (2.13.0): a node of the backward has that of its forward operation.
"""

from __future__ import annotations

import linecache
import sys
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

TORCH = str(Path(torch.__file__).parent)
OWN = str(Path(__file__).parents[1])
CALLER = f"{OWN}/programs/reference.py"
NOT_THE_USERS = (
    f"{OWN}/oracle/",
    f"{OWN}/programs/oracle/",
    f"{OWN}/programs/boundaries.py",
    CALLER,
)


class Place(NamedTuple):
    """A submodule, by its path, and a line of a file; '' where there is none."""

    path: str
    file: str
    line: int

    def __str__(self) -> str:
        """In words that begin with a comma; of the line, 'file:12, `code`'."""
        inside = f", in {self.path}" if self.path else ""
        code = linecache.getline(self.file, self.line).strip()
        return f"{inside}, at {self.file}:{self.line}{f', `{code}`' if code else ''}" if self.file else inside


class Places:
    """Follows a module's forward, so that what fails can be placed.

    Attributes:
        refused: Where the first operation was that was refused; '' where none was.
    """

    def __init__(self) -> None:
        self.refused = ""
        self._open: list[str] = []
        self._numbers: list[int] = []
        self._seen: list[Place] = []

    def watch(self, module: nn.Module) -> None:
        """Notes from now on which submodule is at work."""
        for path, part in module.named_modules():
            part.register_forward_pre_hook(lambda *_, path=path: self._open.append(path))
            part.register_forward_hook(lambda *_: self._close(), always_call=True)

    def note(self) -> None:
        """Notes where the forward is, so that the backward of what it does can be placed."""
        if _node() is None:
            self._numbers.append(_next_number())
            self._seen.append(self._now())

    def refuse(self) -> None:
        """Notes that an operation is refused here."""
        self.refused = self.refused or self.here()

    def here(self) -> str:
        """Where the module is, in words that begin with a comma; '' where nobody knows."""
        node = _node()
        if node is None:
            return str(self._now())
        index = bisect_left(self._numbers, node._sequence_nr() + 1)
        place = str(self._seen[index]) if index < len(self._seen) else ""
        return f", in the backward of what is{place.removeprefix(',')}" if place else ", in the backward"

    def _now(self) -> Place:
        return Place(self._open[-1] if self._open else "", *_line())

    def _close(self) -> None:
        if self._open:
            self._open.pop()


def _node() -> Any:
    """The node of the backward that is at work; None in the forward."""
    return torch._C._current_autograd_node()


def _next_number() -> int:
    return torch._C._autograd._get_sequence_nr()


def _line() -> tuple[str, int]:
    """The innermost line that is the user's, else that of the layer of torch's that he calls; else '' and 0."""
    layer = "", 0
    for frame in _frames(sys._getframe(1)):
        line = frame.f_code.co_filename, frame.f_lineno
        if not line[0].startswith(TORCH):
            return line
        if frame.f_code.co_name == "forward" and not layer[0]:
            layer = line
    return layer


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """From the innermost outwards, less our own, up to where the harness calls the module."""
    while frame is not None:
        if frame.f_code.co_filename == CALLER and frame.f_code.co_name == "call":
            return
        if not frame.f_code.co_filename.startswith(NOT_THE_USERS):
            yield frame
        frame = frame.f_back
