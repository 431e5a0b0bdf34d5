"""Defines `Room`, which has the memory for the operands and results of one call of a collective.

Letters: w ranks, n elements of one size.

A result lies within a larger storage, and its memory is not initialised. The memory on both sides of the result, and
between the result's elements, has a fill value, and no collective may write to this memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist

from equivtest.families.collectives.case import Call, CollectivesCase
from equivtest.tensors import same_bits

GUARD = 8
"""Number of elements on each side of a result: the vector length of most kernels, and at least 16 bytes."""


@dataclass(frozen=True)
class Room:
    """The group of one call, this rank's number in the group, and the memory layout of the call's tensors.

    Attributes:
        stride, offset, order: The fields of `CollectivesCase` with these names.
        kept: Storages of earlier calls, which this call reuses in the same order; None if this call has new memory.
        storages: Storages that this call has taken so far.
        mesh: The mesh of the group.
        handed: Operands that were copied for the call, as pairs (copy, original).
    """

    case: CollectivesCase
    group: Any
    rank: int
    stride: int = 1
    offset: int = 0
    order: str = "rows"
    kept: list[torch.Tensor] | None = None
    storages: list[torch.Tensor] = field(default_factory=list)
    handed: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    mesh: Any = None

    @property
    def ranks(self) -> int:
        return self.case.world_size

    @property
    def how(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.case.waits != "at_once"}

    def end(self, name: str, rank: int) -> dict[str, Any]:
        """Returns the argument that names a rank of the group: `name` is 'src', 'dst' or 'peer'."""
        if self.case.names_ranks_in_group:
            return {f"group_{name}": rank}
        return {name: dist.get_global_rank(self.group, rank)}

    @property
    def _untouched(self) -> int:
        """Fill value around results. It differs between ranks, so that a collective on this memory changes it."""
        return -7 - self.rank

    @property
    def is_plain(self) -> bool:
        return self.stride == 1 and not self.offset and self.order == "rows"

    def empty(self, like: torch.Tensor, numel: int | None = None) -> torch.Tensor:
        """Returns an uninitialised tensor in the room's memory, with the shape and strides of `like`.

        If `like` has one dim, the tensor has the room's stride. If `numel` is not None, it then has `numel` elements.
        """
        size = like.numel() if numel is None else numel
        storage = self._take(like, size * self.stride + 2 * GUARD + self.offset)
        for beside in self._beside(storage):
            beside.fill_(self._untouched)
        self.storages.append(storage)
        start = GUARD + self.offset
        if like.dim() == 1:
            return storage[start : start + size * self.stride : self.stride]
        return storage.as_strided(like.shape, like.stride(), storage.storage_offset() + start)

    def _take(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        """Returns a storage of `numel` elements.

        If the case reuses memory and an earlier call's storage is large enough, that storage is returned.

        Otherwise the storage is new. If the case's memory is 'freed' and the device is a CPU, the new storage is placed
        at the address of the earlier storage. On any other device the allocator does this without help, but torch's CPU
        allocator seldom does.
        """
        if self.kept is None or (self.case.memory == "freed" and like.device.type != "cpu"):
            return like.new_empty(numel)
        place = len(self.storages)
        fits = place < len(self.kept) and self.kept[place].dtype == like.dtype and len(self.kept[place]) >= numel
        if not fits:
            self.kept[place : place + 1] = [like.new_empty(numel)]
        storage = self.kept[place][:numel]
        if self.case.memory == "kept":
            return storage
        return torch.frombuffer(storage.view(torch.uint8).numpy(), dtype=like.dtype)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.empty(tensor).copy_(tensor)

    def hand(self, operand: torch.Tensor) -> torch.Tensor:
        """Returns the operand, or a copy in the room's memory layout, with one dim or with one row per rank."""
        if self.is_plain and self.case.memory == "new":
            return operand
        handed = self.empty(self._in_order(operand))
        handed.copy_(operand.view(handed.shape))
        self.handed.append((handed, operand))
        return handed

    def _in_order(self, operand: torch.Tensor) -> torch.Tensor:
        """Returns a view whose shape and strides the room's order requires. Its elements are not used."""
        numel = len(operand) // self.ranks
        if self.order == "rows":
            return operand
        if self.order == "transposed":
            rows, columns = _factors(numel)
            return operand.view(self.ranks, columns, rows).transpose(1, 2)
        channels, pixels = _factors(numel)
        height, width = _factors(pixels)
        return operand.view(self.ranks, height, width, channels).permute(0, 3, 1, 2)

    def require_guards(self) -> None:
        """Raises RuntimeError if the call wrote outside of its results or to a copied operand."""
        for storage in self.storages:
            if any(bool((beside != self._untouched).any()) for beside in self._beside(storage)):
                raise RuntimeError("the collective wrote outside of the memory of its result")
        for handed, operand in self.handed:
            if not same_bits(handed.reshape(-1), operand):
                raise RuntimeError("the collective wrote into its operand")

    def splits(self, numel: int) -> tuple[list[int], list[int]]:
        """Returns (sent, received) for uneven splits: the numbers of elements for and from each rank."""
        split, rank, ranks = self.case.split, self.rank, range(self.ranks)
        return [split(numel, rank, other) for other in ranks], [split(numel, other, rank) for other in ranks]

    def _beside(self, storage: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields views of the memory around a result: before, after and between the elements of the result."""
        first, stop = GUARD + self.offset, len(storage) - GUARD
        yield storage[:first]
        yield storage[stop:]
        for start in range(first + 1, first + self.stride):
            yield storage[start : stop : self.stride]


def _factors(numel: int) -> tuple[int, int]:
    """Returns two factors of `numel`: the largest factor up to its square root, and `numel` divided by that factor."""
    first = next((factor for factor in range(math.isqrt(numel), 0, -1) if numel % factor == 0), 1)
    return first, numel // first


@dataclass(frozen=True)
class Begun:
    """A collective call that has begun.

    A `Begun` has the works to wait for, as torch.distributed returned them, and a function that returns the call's
    result after the wait. There are no works if the call has ended.
    """

    works: Sequence[Any]
    result: Callable[[], torch.Tensor]

    def end(self) -> torch.Tensor:
        for work in self.works:
            if work is not None:
                work.wait()
        return self.result().clone()


Begin = Callable[[Room, Call, torch.Tensor], Begun]
"""Function (room, call, operand) -> begun call. The operand has w * n elements: (w * n,) or (w, *dims of n)."""


def first(room: Room, own: torch.Tensor) -> torch.Tensor:
    return own[: len(own) // room.ranks]


def rows(room: Room, whole: torch.Tensor) -> torch.Tensor:
    return whole.reshape(room.ranks, whole.numel() // room.ranks)


def parts(room: Room, own: torch.Tensor) -> list[torch.Tensor]:
    return list(own.tensor_split(room.ranks))


def empties(room: Room, like: torch.Tensor) -> list[torch.Tensor]:
    return [room.empty(like) for _ in range(room.ranks)]


def cut(room: Room, own: torch.Tensor, sent: Sequence[int]) -> torch.Tensor:
    """Joins the first `sent[rank]` elements of the part for each rank."""
    return room.hand(torch.cat([part[:numel] for part, numel in zip(parts(room, own), sent, strict=True)]))


def padded(found: torch.Tensor, numel: int) -> torch.Tensor:
    return torch.cat([found, found.new_zeros(numel - len(found))])
