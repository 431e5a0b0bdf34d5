"""Begins messages between two ranks, collectives of Python objects, and barriers, through torch.distributed.

The operand `own` of a call has one part for each rank. Each function that begins a call returns a `Begun`. Nevertheless
the "Returns" in its docstring describes the result of `Begun.end`.

Source: the docstrings in torch/distributed/distributed_c10d.py (2.13.0).
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

from equivtest.families.collectives.case import Call
from equivtest.families.collectives.subject_room import Begun, Room, empties, first, parts
from equivtest.tensors import as_bits


def send_and_receive(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """Sends a part to every other rank and receives a part from it, rank by rank. Returns one row per rank.

    If calls are synchronous, the rank with the lower number sends first.
    """
    mine, outputs = parts(room, own), empties(room, first(room, own))
    works: list[Any] = []
    outputs[room.rank].copy_(mine[room.rank])
    is_sync = not room.how["async_op"]
    for peer in _others(room):
        for sends in (room.rank < peer, room.rank > peer):
            function: Any = (dist.send if is_sync else dist.isend) if sends else (dist.recv if is_sync else dist.irecv)
            end = room.end("dst" if sends else "src", peer)
            work = function(mine[peer] if sends else outputs[peer], group=room.group, **end)
            works += [] if is_sync else [work]
    return Begun(works, lambda: torch.stack(outputs))


def batched_send_and_receive(room: Room, call: Call, own: torch.Tensor) -> Begun:
    mine, outputs = parts(room, own), empties(room, first(room, own))
    outputs[room.rank].copy_(mine[room.rank])
    calls = [dist.P2POp(dist.isend, mine[peer], group=room.group, **room.end("peer", peer)) for peer in _others(room)]
    calls += [
        dist.P2POp(dist.irecv, outputs[peer], group=room.group, **room.end("peer", peer)) for peer in _others(room)
    ]
    works = dist.batch_isend_irecv(calls) if calls else []
    return Begun(works, lambda: torch.stack(outputs))


def tagged_send_and_receive(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """Sends one message per tag to every other rank. Receivers take the messages from the last tag to the first.

    Each message has this rank's part for the receiver, in a different order for each tag. The result has one row per
    rank. Neighbouring elements of a row come from different messages.

    Raises:
        NotImplementedError: the backend is NCCL, which according to torch has no tags (2.13.0).
    """
    if dist.get_backend(room.group) == "nccl":
        raise NotImplementedError("torch documents that tags are not supported with the NCCL backend")
    mine, first_of_all = parts(room, own), first(room, own)
    outputs = {tag: empties(room, first_of_all) for tag in TAGS}
    works: list[Any] = []
    for tag, peer in itertools.product(TAGS, _others(room)):
        message = room.empty(first_of_all).copy_(_turned(mine[peer], tag))
        works.append(dist.isend(message, group=room.group, tag=tag, **room.end("dst", peer)))
    for tag, peer in itertools.product(reversed(TAGS), _others(room)):
        receive: Any = dist.irecv if room.how["async_op"] else dist.recv
        work = receive(outputs[tag][peer], group=room.group, tag=tag, **room.end("src", peer))
        works += [work] if room.how["async_op"] else []

    def mixed() -> torch.Tensor:
        found = torch.stack([part.reshape(-1) for part in mine])
        for tag, peer in itertools.product(TAGS, _others(room)):
            found[peer, tag :: len(TAGS)] = _turned(outputs[tag][peer], -tag).reshape(-1)[tag :: len(TAGS)]
        return found

    return Begun(works, mixed)


def _turned(part: torch.Tensor, places: int) -> torch.Tensor:
    return part.reshape(-1).roll(places).view(part.shape)


def _others(room: Room) -> list[int]:
    """Returns the other ranks, lowest first. If every rank exchanges messages in this order, no rank waits forever."""
    return [rank for rank in range(room.ranks) if rank != room.rank]


def all_gather_object(room: Room, call: Call, own: torch.Tensor) -> Begun:
    found: list[Any] = [None] * room.ranks
    dist.all_gather_object(found, _as_object(first(room, own)), group=room.group)
    return Begun([], lambda: torch.stack([_as_tensor(each, own) for each in found]))


def gather_object(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """Gathers with each rank as the root in turn. Returns what this rank gathers as the root, one row per rank."""
    found: list[Any] = [None] * room.ranks
    for root in range(room.ranks):
        into = found if root == room.rank else None
        dist.gather_object(_as_object(first(room, own)), into, group=room.group, **room.end("dst", root))
    return Begun([], lambda: torch.stack([_as_tensor(each, own) for each in found]))


def broadcast_object_list(room: Room, call: Call, own: torch.Tensor) -> Begun:
    found = []
    for root in range(room.ranks):
        objects: list[Any] = [_as_object(first(room, own)) if root == room.rank else None]
        dist.broadcast_object_list(objects, group=room.group, **room.end("src", root))
        found.append(objects[0])
    return Begun([], lambda: torch.stack([_as_tensor(each, own) for each in found]))


def scatter_object_list(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """Scatters with each rank as the root in turn. Returns one row per root: the root's part for this rank."""
    found = []
    for root in range(room.ranks):
        output: list[Any] = [None]
        given = [_as_object(part) for part in parts(room, own)] if root == room.rank else None
        dist.scatter_object_list(output, given, group=room.group, **room.end("src", root))
        found.append(output[0])
    return Begun([], lambda: torch.stack([_as_tensor(each, own) for each in found]))


def barrier(room: Room, call: Call, own: torch.Tensor) -> Begun:
    return _told_behind(room, own, lambda: dist.barrier(**room.how))


def monitored_barrier(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """Calls monitored_barrier, which torch documents only for gloo and without `async_op`."""
    return _told_behind(room, own, lambda: dist.monitored_barrier(room.group))


def _told_behind(room: Room, own: torch.Tensor, wait: Callable[[], Any]) -> Begun:
    """Writes this rank's elements to the default store of torch.distributed, then begins a barrier by `wait`.

    The result is all ranks' elements, one row per rank, which each rank reads from the store after the barrier. The
    last rank writes late, after all others. If a rank's barrier does not wait for the last rank, the store does not
    have the last rank's elements yet, and the result has zeros in their place.
    """
    store, processes = distributed_c10d._get_default_store(), tuple(dist.get_process_group_ranks(room.group))
    key, mine = f"barrier {processes} {next(_barriers[processes])}", first(room, own).reshape(-1)
    if room.rank == room.ranks - 1:
        for other in _others(room):
            store.get(f"{key} {other}")  # waits until the other rank has written
        time.sleep(LATE_S)
    store.set(f"{key} {room.rank}", as_bits(mine).cpu().numpy().tobytes().hex())
    store.get(f"{key} {room.rank}")  # a TCPStore's set returns before the store has it
    work = wait()

    def told() -> torch.Tensor:
        found = []
        for rank in range(room.ranks):
            text = store.get(f"{key} {rank}") if store.check([f"{key} {rank}"]) else b""
            bits = torch.frombuffer(bytearray.fromhex(text.decode()), dtype=as_bits(own[:0]).dtype) if text else None
            found.append(torch.zeros_like(mine) if bits is None else bits.view(own.dtype).to(own.device))
        return torch.stack(found)

    return Begun([work], told)


def _as_object(tensor: torch.Tensor) -> dict[str, list[int]]:
    return {"bits": as_bits(tensor).tolist()}


def _as_tensor(found: dict[str, list[int]], like: torch.Tensor) -> torch.Tensor:
    bits = torch.tensor(found["bits"], dtype=as_bits(like[:0]).dtype)
    return bits.view(like.dtype).to(like.device)


LATE_S = 0.005  # time for ranks that did not wait to read the store; they take microseconds
_barriers: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
"""Processes of a group -> number of its next barrier, equal on all of them."""

TAGS = (0, 1, 2)
"""Tags of the messages that one rank sends to another and that are in flight at once."""

PAIRS = (send_and_receive, batched_send_and_receive, tagged_send_and_receive)
OBJECTS = (all_gather_object, gather_object, broadcast_object_list, scatter_object_list)
