"""Finds the submodule that runs an operation and the line of the user's code, in the forward and in the backward.

Source: torch.autograd's sequence numbers (2.13.0): a node of the backward has the number of its forward operation.
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
EXAMPLES = f"{OWN}/programs/examples/"
NOT_THE_USERS = (
    f"{OWN}/oracle/",
    f"{OWN}/programs/oracle/",
    f"{OWN}/programs/boundaries.py",
    CALLER,
)


class Place(NamedTuple):
    """The path of a submodule, and a line of a file. Each text is '' if it is unknown."""

    path: str
    file: str
    line: int

    def __str__(self) -> str:
        """Describes the place in words that begin with a comma. A line of code has the form 'file:12, `code`'."""
        inside = f", in {self.path}" if self.path else ""
        code = linecache.getline(self.file, self.line).strip()
        return f"{inside}, at {self.file}:{self.line}{f', `{code}`' if code else ''}" if self.file else inside


class Places:
    """Records the submodule that runs in a module's forward, so that messages can name the place of a failure.

    Attributes:
        refused: Place of the first refused operation. It is '' if no operation was refused.
    """

    def __init__(self) -> None:
        self.refused = ""
        self._open: list[str] = []
        self._numbers: list[int] = []
        self._seen: list[Place] = []

    def watch(self, module: nn.Module) -> None:
        for path, part in module.named_modules():
            part.register_forward_pre_hook(lambda *_, path=path: self._open.append(path))
            part.register_forward_hook(lambda *_: self._close(), always_call=True)

    def note(self) -> None:
        """Records the present place in the forward for the operation's backward, which then has the same place.

        Only the first of several operations with the same sequence number counts, since `here` looks up the first.
        """
        if _node() is None and self._numbers[-1:] != [number := _next_number()]:
            self._numbers.append(number)
            self._seen.append(self._now())

    def refuse(self) -> None:
        self.refused = self.refused or self.here()

    def here(self) -> str:
        """Returns the present place of the module, in words that begin with a comma, or '' if the place is unknown."""
        node = _node()
        if node is None:
            return str(self._now())
        index = bisect_left(self._numbers, node._sequence_nr() + 1)
        place = str(self._seen[index]) if index < len(self._seen) else ""
        return f", in the backward of the forward{place.removeprefix(',')}" if place else ", in the backward"

    def _now(self) -> Place:
        return Place(self._open[-1] if self._open else "", *_line())

    def _close(self) -> None:
        if self._open:
            self._open.pop()


def _node() -> Any:
    """Returns the running node of the backward. Returns None in the forward."""
    return torch._C._current_autograd_node()


def _next_number() -> int:
    return torch._C._autograd._get_sequence_nr()


def _line() -> tuple[str, int]:
    """Returns (file, line) of the user's innermost frame.

    If no frame is the user's, returns (file, line) of a torch layer's forward. If no torch layer runs either, returns
    ('', 0).
    """
    layer = "", 0
    for frame in _frames(sys._getframe(1)):
        line = frame.f_code.co_filename, frame.f_lineno
        if not line[0].startswith(TORCH):
            return line
        if frame.f_code.co_name == "forward" and not layer[0]:
            layer = line
    return layer


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields frames from the innermost outwards, up to the harness's call of the module, or of the oracle.

    Skips the frames of the oracle. Behind the call of the oracle no frame belongs to the module.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if file == CALLER and frame.f_code.co_name == "call":
            return
        if not file.startswith(NOT_THE_USERS):
            if file.startswith(f"{OWN}/") and not file.startswith(EXAMPLES):
                return
            yield frame
        frame = frame.f_back
