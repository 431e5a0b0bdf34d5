"""Where a collective takes place: the group, memory for its results, and the parts of what a rank has.

Letters: w ranks, n elements of one size.

Memory for results lies within a larger storage, and is never written to before; what lies on both sides of it and
between its elements is, and nobody may write there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from equivtest.families.collectives.case import Call, CollectivesCase
from equivtest.tensors import same_bits

GUARD = 8
"""Elements on each side of a result: a vector of most kernels, and 16 bytes at least."""


@dataclass(frozen=True)
class Room:
    """Where one call takes place: the group, this rank's number in it, and how the case has it called.

    Attributes:
        stride: Elements of memory from one element to the next.
        storages: What its results lie in.
        handed: Operands that lie between other elements, each with the one that they are a copy of.
    """

    case: CollectivesCase
    group: Any
    rank: int
    stride: int = 1
    storages: list[torch.Tensor] = field(default_factory=list)
    handed: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return self.case.world_size

    @property
    def how(self) -> dict[str, Any]:
        """What every function of torch.distributed takes."""
        return {"group": self.group, "async_op": self.case.waits != "at_once"}

    @property
    def _untouched(self) -> int:
        """What lies beside results: on each rank another number, so that what is sent or reduced there changes it."""
        return -7 - self.rank

    def empty(self, like: torch.Tensor, numel: int | None = None) -> torch.Tensor:
        """Memory for so many elements, or for as many as `like` has."""
        size = like.numel() if numel is None else numel
        storage = like.new_empty(size * self.stride + 2 * GUARD)
        for beside in _beside(storage, self.stride):
            beside.fill_(self._untouched)
        self.storages.append(storage)
        return storage[GUARD : GUARD + size * self.stride : self.stride]

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory with these elements, for what works in place."""
        return self.empty(tensor).copy_(tensor)

    def hand(self, operand: torch.Tensor) -> torch.Tensor:
        """The operand, or a copy of it that lies in memory as the room has it."""
        if self.stride == 1:
            return operand
        handed = self.copy(operand)
        self.handed.append((handed, operand))
        return handed

    def require_guards(self) -> None:
        """Raises RuntimeError where something was written beside a result, or into an operand that is a copy."""
        for storage in self.storages:
            if any(bool((beside != self._untouched).any()) for beside in _beside(storage, self.stride)):
                raise RuntimeError("it wrote beside the memory of its result")
        for handed, operand in self.handed:
            if not same_bits(handed, operand):
                raise RuntimeError("it wrote into its operand")

    def splits(self, numel: int) -> tuple[list[int], list[int]]:
        """Elements that this rank sends to each, and gets from each, where splits are uneven."""
        split, rank, ranks = self.case.split, self.rank, range(self.ranks)
        return [split(numel, rank, other) for other in ranks], [split(numel, other, rank) for other in ranks]


@dataclass(frozen=True)
class Begun:
    """A call that has begun: what is waited for, nothing where it has ended, and what gives its result then."""

    works: Sequence[Any]
    result: Callable[[], torch.Tensor]

    def end(self) -> torch.Tensor:
        """The result, in memory of its own, once all has been waited for."""
        for work in self.works:
            if work is not None:
                work.wait()
        return self.result().clone()


def _beside(storage: torch.Tensor, stride: int) -> Iterator[torch.Tensor]:
    """Views of what lies on both sides of the memory of a result, and of what lies between its elements."""
    stop = len(storage) - GUARD
    yield storage[:GUARD]
    yield storage[stop:]
    for start in range(GUARD + 1, GUARD + stride):
        yield storage[start:stop:stride]


Begin = Callable[[Room, Call, torch.Tensor], Begun]
"""Begins a call on this rank's w * n elements; its result has n elements, or w * n, in the last dim."""


def first(room: Room, own: torch.Tensor) -> torch.Tensor:
    """The first n of the w * n elements, a view."""
    return own[: len(own) // room.ranks]


def rows(room: Room, whole: torch.Tensor) -> torch.Tensor:
    """(w * n,) as (w, n)."""
    return whole.reshape(room.ranks, len(whole) // room.ranks)


def parts(room: Room, own: torch.Tensor) -> list[torch.Tensor]:
    """The w parts of n elements, views."""
    return list(rows(room, own).unbind())


def empties(room: Room, like: torch.Tensor) -> list[torch.Tensor]:
    """Memory for one result of each rank."""
    return [room.empty(like) for _ in range(room.ranks)]


def cut(room: Room, own: torch.Tensor, sent: Sequence[int]) -> torch.Tensor:
    """The first elements of each of the w parts, so many of each, in memory as the room has it."""
    return room.hand(torch.cat([part[:numel] for part, numel in zip(parts(room, own), sent, strict=True)]))


def padded(found: torch.Tensor, numel: int) -> torch.Tensor:
    """The elements, and zeros up to so many."""
    return torch.cat([found, found.new_zeros(numel - len(found))])
