"""Exchanges values among all ranks of a captured job, whose processes another program has started."""

from __future__ import annotations

from typing import Any

from torch import distributed


class Group:
    """All ranks of the job, or this process alone if there is no process group."""

    def __init__(self) -> None:
        self._is_alone = not (distributed.is_available() and distributed.is_initialized())
        self.rank = 0 if self._is_alone else distributed.get_rank()
        self.size = 1 if self._is_alone else distributed.get_world_size()

    def from_first(self, text: str) -> str:
        """Returns, on every rank, the text that rank 0 passes.  All ranks must call this method."""
        return str(self.all_of(text)[0])

    def all_of(self, value: Any) -> list[Any]:
        """Returns the ranks' values in rank order.  All ranks must call this method."""
        values = [value] * self.size
        if not self._is_alone:
            distributed.all_gather_object(values, value)
        return values
