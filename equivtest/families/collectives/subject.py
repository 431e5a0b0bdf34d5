"""Subject that calls the collectives of torch.distributed, one after the other.

The operand of a call has one part for each rank, and all parts have one size. A collective to which a rank gives one
tensor takes the first part.

A function that begins a collective returns a `Begun`. Nevertheless the "Returns" in its docstring describes the result
of `Begun.end`. Each result is copied as soon as the call, or the wait for the call, has returned. So the copy shows if
a result arrives too late.

Source: the docstrings in torch/distributed/distributed_c10d.py and torch/distributed/_functional_collectives.py
(2.13.0).
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from equivtest.base.refusal import is_refusal
from equivtest.cases.subject import Given
from equivtest.errors import Unsupported
from equivtest.families.collectives.case import BITWISE, FACTOR, OPERANDS, Call, CollectivesCase
from equivtest.families.collectives.subject_pairs import OBJECTS, PAIRS, barrier, monitored_barrier
from equivtest.families.collectives.subject_room import Begin, Begun, Room, cut, empties, first, padded, parts, rows
from equivtest.tensors import SIGNIFICAND_BITS, Placed, as_bits

REDUCE_OPS = {op: getattr(dist.ReduceOp, op.upper()) for op in OPERANDS if op not in ("", "premul")}
REDUCE_OPS["premul"] = dist._make_nccl_premul_sum(FACTOR)  # type: ignore[attr-defined]

# Renamed in torch 2.13, which warns of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CollectiveRaised(RuntimeError):
    """Raised if a collective raises an error. The message names the collective."""


def collectives(case: CollectivesCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """Calls every collective of the case on every size, through torch.distributed. Returns the results by name."""
    return run_collectives(case, mesh, given, begin)


def run_collectives(case: CollectivesCase, mesh: DeviceMesh, given: Given, begin: Begin) -> dict[str, Placed]:
    """Returns the results by name, each joined over all sizes. `begin` begins one call."""
    begun: list[tuple[Call, Room, Begun]] = []
    results: dict[str, list[torch.Tensor]] = {name: [] for name in case.collectives}
    kept: list[torch.Tensor] | None = None if case.memory == "new" else []
    for call, _ in itertools.product(case.calls, range(case.times)):
        for operand in operands_of(case, call, given):
            room = room_of(case, call, mesh, kept)
            with naming(call, case.dtype):
                if case.memory != "new":
                    call_before(room, call, operand, begin)
                begun.append((call, *begin_in(room, call, operand, begin)))
            if case.waits in ("at_once", "async"):
                end_all(case, begun, results)
    end_all(case, begun, results)
    layouts = case.layouts()
    answers = {call.name: in_place(call, odd_one(case, call, results[call.name])) for call in case.calls}
    return {name: Placed(answer, layouts[name]) for name, answer in answers.items()}


def room_of(case: CollectivesCase, call: Call, mesh: DeviceMesh, kept: list[torch.Tensor] | None) -> Room:
    order, group = "rows" if call.result == "uneven" else case.order, mesh.get_group()
    return Room(case, group, dist.get_rank(group), case.stride, case.offset, order, kept, mesh=mesh)


def call_before(room: Room, call: Call, operand: torch.Tensor, begin: Begin) -> None:
    """Makes an earlier call, on the reversed operand, in the kept memory that the judged call then reuses."""
    begin_in(replace(room, storages=[], handed=[]), call, operand.flip(0), begin)[1].end()


def begin_in(room: Room, call: Call, operand: torch.Tensor, begin: Begin) -> tuple[Room, Begun]:
    """Begins a call. Returns (room whose memory the call uses, begun call).

    If the backend's error asks for contiguous or aligned memory, the call is begun again in a new room with such
    memory. torch documents no stride that a collective must accept: NCCL's group refuses all except contiguous tensors
    (ProcessGroupNCCL.cpp, 2.13.0), gloo refuses some strides.
    """
    try:
        return room, begin(room, call, operand if call.lays_out_itself else room.hand(operand))
    except Exception as error:  # a backend may raise anything
        if room.is_plain or not any(word in str(error) for word in ("contiguous", "aligned")):
            raise
        plain = Room(room.case, room.group, room.rank, kept=room.kept, mesh=room.mesh)
        return begin_in(plain, call, operand, begin)


def operands_of(case: CollectivesCase, call: Call, given: Given) -> list[torch.Tensor]:
    """Returns this rank's operands, one per size. A coalesced call has one operand with the elements of all sizes."""
    own = given[call.operand][0]
    return [own] if call.is_coalesced else [own[start:stop] for start, stop in case.bounds]


def odd_one(case: CollectivesCase, call: Call, results: list[torch.Tensor]) -> torch.Tensor:
    """Returns the first repetition's joined results, or a later repetition's if its bits differ, which is a defect."""
    num = 1 if call.is_coalesced else len(case.numels)
    first, *others = (torch.cat(results[at : at + num], dim=-1) for at in range(0, len(results), num))
    return next((other for other in others if not torch.equal(as_bits(other), as_bits(first))), first)


def end_all(
    case: CollectivesCase, begun: list[tuple[Call, Room, Begun]], results: dict[str, list[torch.Tensor]]
) -> None:
    """Waits for the begun calls as `case.waits` says, and appends their results in the order of the calls."""
    ended: list[torch.Tensor] = []
    is_backwards = case.waits == "backwards"
    for call, room, each in reversed(begun) if is_backwards else begun:
        with naming(call, case.dtype):
            ended.append(flat(call, room, each.end()))
            room.require_guards()
    for (call, _, _), result in zip(begun, reversed(ended) if is_backwards else ended, strict=True):
        results[call.name].append(result)
    begun.clear()


def flat(call: Call, room: Room, result: torch.Tensor) -> torch.Tensor:
    return rows(room, result) if call.result in ("gathered", "exchanged") else result.reshape(-1)


def in_place(call: Call, result: torch.Tensor) -> torch.Tensor:
    """Returns this rank's local tensor of an answer, with a first dim of size 1 if values differ between ranks."""
    return result if call.result in ("reduced", "gathered") else result[None]


@contextmanager
def naming(call: Call, dtype: str) -> Iterator[None]:
    """Adds the collective's name to errors raised in the block.

    Raises:
        Unsupported: the backend says that it lacks the collective.
        CollectiveRaised: any other error.
    """
    try:
        yield
    except Exception as error:  # a backend may raise anything
        text = f"{call.name} of {dtype} raised {type(error).__name__}: {error}"
        if is_refusal(error):
            raise Unsupported(text, lacking=f"{dtype}:{call.name}") from error
        raise CollectiveRaised(text) from error


def begin(room: Room, call: Call, own: torch.Tensor) -> Begun:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of former names
        return FUNCTIONS[call.function](room, call, own)


def all_reduce(room: Room, call: Call, own: torch.Tensor) -> Begun:
    mine = first(room, own)
    buffer = room.copy(mine.to(integers_like(mine)) if call.op in BITWISE else mine)
    work = dist.all_reduce(buffer, op=REDUCE_OPS[call.op], **room.how)
    return Begun([work], lambda: buffer.to(own.dtype))


def integers_like(tensor: torch.Tensor) -> torch.dtype:
    return torch.int64 if tensor.element_size() == 8 else torch.int32


def all_gather(room: Room, call: Call, own: torch.Tensor) -> Begun:
    mine = first(room, own)
    outputs = empties(room, mine)
    return Begun([dist.all_gather(outputs, mine, **room.how)], lambda: torch.stack(outputs))


def all_gather_into_tensor(room: Room, call: Call, own: torch.Tensor) -> Begun:
    output = room.empty(own)
    work = all_gather_single(output, first(room, own), **room.how)
    return Begun([work], lambda: rows(room, output))


def reduce_scatter_tensor(room: Room, call: Call, own: torch.Tensor) -> Begun:
    output = room.empty(first(room, own))
    return Begun([reduce_scatter_single(output, own, op=REDUCE_OPS[call.op], **room.how)], lambda: output)


def reduce_scatter(room: Room, call: Call, own: torch.Tensor) -> Begun:
    output = room.empty(first(room, own))
    work = dist.reduce_scatter(output, parts(room, own), op=REDUCE_OPS[call.op], **room.how)
    return Begun([work], lambda: output)


def broadcast(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """Broadcasts the first part of each root's operand. Each rank is the root in turn. Returns one row per root."""
    mine = first(room, own)
    buffers = [room.copy(mine) if root == room.rank else room.empty(mine) for root in range(room.ranks)]
    works = [dist.broadcast(buffer, **room.end("src", root), **room.how) for root, buffer in enumerate(buffers)]
    return Begun(works, lambda: torch.stack(buffers))


def scatter(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """Scatters with each rank as the root in turn. Returns one row per root: the root's part for this rank."""
    outputs = empties(room, first(room, own))
    works = [
        dist.scatter(output, parts(room, own) if root == room.rank else None, **room.end("src", root), **room.how)
        for root, output in enumerate(outputs)
    ]
    return Begun(works, lambda: torch.stack(outputs))


def gather(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """Gathers with each rank as the root in turn. Returns what this rank gathers as the root, one row per rank."""
    mine = first(room, own)
    outputs = empties(room, mine)
    works = [
        dist.gather(mine, outputs if root == room.rank else None, **room.end("dst", root), **room.how)
        for root in range(room.ranks)
    ]
    return Begun(works, lambda: torch.stack(outputs))


def reduce(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """Reduces with each rank as the root in turn. Returns the result of the call whose root is this rank."""
    buffers = [room.copy(first(room, own)) for _ in range(room.ranks)]
    works = [
        dist.reduce(buffer, op=REDUCE_OPS[call.op], **room.end("dst", root), **room.how)
        for root, buffer in enumerate(buffers)
    ]
    return Begun(works, lambda: buffers[room.rank])


def all_to_all_single(room: Room, call: Call, own: torch.Tensor) -> Begun:
    output = room.empty(own)
    return Begun([dist.all_to_all_single(output, own, **room.how)], lambda: rows(room, output))


def all_to_all_single_uneven(room: Room, call: Call, own: torch.Tensor) -> Begun:
    sent, got = room.splits(len(own) // room.ranks)
    output = room.empty(own, sum(got))
    work = dist.all_to_all_single(output, cut(room, own, sent), got, sent, **room.how)
    return Begun([work], lambda: padded(output, len(own)))


def all_to_all(room: Room, call: Call, own: torch.Tensor) -> Begun:
    outputs = empties(room, first(room, own))
    return Begun([dist.all_to_all(outputs, parts(room, own), **room.how)], lambda: torch.stack(outputs))


def place(room: Room) -> Any:
    """Returns the group as the case gives it to functional collectives.

    No case gives a list of ranks, which is deprecated: torch takes any group with these ranks, in whatever order.
    """
    forms: dict[str, Callable[[], Any]] = {
        "group": lambda: room.group,
        "mesh": lambda: room.mesh,
        "axis": lambda: axis_of(room.mesh),
        "name": lambda: room.group.group_name,
    }
    return forms[room.case.group_form]()


def axis_of(mesh: DeviceMesh) -> tuple[DeviceMesh, int]:
    """Returns a mesh and the number of its axis with the ranks of `mesh`. It is the second axis if these are all."""
    is_world = mesh.mesh.tolist() == list(range(dist.get_world_size()))
    return (in_one_row(mesh.device_type, mesh.size()), 1) if is_world else (mesh, 0)


@functools.cache
def in_one_row(device_type: str, ranks: int) -> DeviceMesh:
    return init_device_mesh(device_type, (1, ranks))


def functional_all_reduce(room: Room, call: Call, own: torch.Tensor) -> Begun:
    output = functional.all_reduce(first(room, own), call.op, place(room))
    return Begun([], lambda: waited(output))


def functional_all_gather_tensor(room: Room, call: Call, own: torch.Tensor) -> Begun:
    output = functional.all_gather_tensor(first(room, own), 0, place(room))
    return Begun([], lambda: rows(room, waited(output)))


def functional_reduce_scatter_tensor(room: Room, call: Call, own: torch.Tensor) -> Begun:
    output = functional.reduce_scatter_tensor(own, call.op, 0, place(room))
    return Begun([], lambda: waited(output))


def functional_broadcast(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """Returns one row per root. A rank that is not the root passes its own operand, which must not be returned."""
    outputs = [functional.broadcast(first(room, own), root, place(room)) for root in range(room.ranks)]
    return Begun([], lambda: torch.stack([waited(output) for output in outputs]))


def functional_all_to_all_single(room: Room, call: Call, own: torch.Tensor) -> Begun:
    output = functional.all_to_all_single(own, None, None, place(room))
    return Begun([], lambda: rows(room, waited(output)))


def functional_all_to_all_single_uneven(room: Room, call: Call, own: torch.Tensor) -> Begun:
    sent, got = room.splits(len(own) // room.ranks)
    output = functional.all_to_all_single(cut(room, own, sent), got, sent, place(room))
    return Begun([], lambda: padded(waited(output), len(own)))


def functional_all_reduce_coalesced(room: Room, call: Call, own: torch.Tensor) -> Begun:
    outputs = functional.all_reduce_coalesced(halves(first(room, own).reshape(1, -1)), call.op, place(room))
    return Begun([], lambda: torch.cat([waited(output) for output in outputs]))


def functional_all_gather_into_tensor_coalesced(room: Room, call: Call, own: torch.Tensor) -> Begun:
    mine = halves(first(room, own).reshape(1, -1))
    outputs = functional.all_gather_into_tensor_coalesced(mine, place(room))
    return Begun([], lambda: torch.cat([rows(room, waited(output)) for output in outputs], dim=1))


def functional_reduce_scatter_tensor_coalesced(room: Room, call: Call, own: torch.Tensor) -> Begun:
    outputs = functional.reduce_scatter_tensor_coalesced(halves(rows(room, own)), call.op, [0, 0], place(room))
    return Begun([], lambda: torch.cat([waited(output) for output in outputs]))


def halves(whole: torch.Tensor) -> list[torch.Tensor]:
    """Returns the first halves of all rows, one after the other, and the second halves."""
    return [half.reshape(-1) for half in whole.tensor_split(2, dim=1)]


def functional_all_reduce_inplace(room: Room, call: Call, own: torch.Tensor) -> Begun:
    buffer = room.copy(first(room, own))
    functional.all_reduce_inplace(buffer, call.op, place(room))
    return Begun([], lambda: buffer)


def functional_all_gather_tensor_inplace(room: Room, call: Call, own: torch.Tensor) -> Begun:
    output = room.empty(own)
    functional.all_gather_tensor_inplace(output, first(room, own), place(room))
    return Begun([], lambda: rows(room, output))


def functional_all_gather_inplace(room: Room, call: Call, own: torch.Tensor) -> Begun:
    outputs = empties(room, first(room, own).reshape(-1))
    functional.all_gather_inplace(outputs, first(room, own).reshape(-1), place(room))
    return Begun([], lambda: torch.stack(outputs))


def functional_reduce_scatter_tensor_inplace(room: Room, call: Call, own: torch.Tensor) -> Begun:
    output = room.empty(first(room, own))
    functional.reduce_scatter_tensor_inplace(output, own, call.op, place(room))
    return Begun([], lambda: output)


def functional_all_to_all_inplace(room: Room, call: Call, own: torch.Tensor) -> Begun:
    sent, got = room.splits(len(own) // room.ranks)
    output = room.empty(own, sum(got))
    functional.all_to_all_inplace(output, cut(room, own, sent), got, sent, place(room))
    return Begun([], lambda: padded(output, len(own)))


def functional_permute_tensor(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """Sends each part to a rank by a separate call. It takes tensors of one dim, and no name (finding 148)."""
    mine, ranks, group = parts(room, own), room.ranks, room.group if room.case.group_form == "name" else place(room)
    outputs = [
        functional.permute_tensor(
            mine[(room.rank + step) % ranks].reshape(-1), [(rank + step) % ranks for rank in range(ranks)], group
        )
        for step in range(ranks)
    ]
    return Begun([], lambda: torch.stack([waited(outputs[(room.rank - source) % ranks]) for source in range(ranks)]))


def functional_batch_p2p_ops_inplace(room: Room, call: Call, own: torch.Tensor) -> Begun:
    """Sends and receives in one call. `isend_inplace` and `irecv_inplace` are left out: see finding 148."""
    mine, outputs = parts(room, own), empties(room, first(room, own))
    outputs[room.rank].copy_(mine[room.rank])
    peers = [rank for rank in range(room.ranks) if rank != room.rank]
    if not peers:
        return Begun([], lambda: torch.stack(outputs))
    waiting = functional.batch_p2p_ops_inplace(
        ["isend"] * len(peers) + ["irecv"] * len(peers),
        peers * 2,
        [0] * len(peers) * 2,
        [mine[peer] for peer in peers] + [outputs[peer] for peer in peers],
        place(room),
    )

    def exchanged() -> torch.Tensor:
        for each in waiting:
            waited(each)
        return torch.stack(outputs)

    return Begun([], exchanged)


def coalesced_all_reduce(room: Room, call: Call, own: torch.Tensor) -> Begun:
    return coalesce(room, call, own, all_reduce)


def coalesced_all_gather_into_tensor(room: Room, call: Call, own: torch.Tensor) -> Begun:
    return coalesce(room, call, own, all_gather_into_tensor)


def coalesced_reduce_scatter_tensor(room: Room, call: Call, own: torch.Tensor) -> Begun:
    return coalesce(room, call, own, reduce_scatter_tensor)


def coalesce(room: Room, call: Call, own: torch.Tensor, begin_one: Begin) -> Begun:
    manager = dist._coalescing_manager(group=room.group, async_ops=room.how["async_op"])  # type: ignore[attr-defined]
    with manager as work:
        begun = [begin_one(room, call, room.hand(own[start:stop])) for start, stop in room.case.bounds]
    works = [work] if room.how["async_op"] else []
    return Begun(works, lambda: torch.cat([flat(call, room, each.result()) for each in begun], dim=-1))


def int64_all_reduce(room: Room, call: Call, own: torch.Tensor) -> Begun:
    return on_int64(room, call, own, all_reduce)


def int64_reduce(room: Room, call: Call, own: torch.Tensor) -> Begun:
    return on_int64(room, call, own, reduce)


def int64_reduce_scatter_tensor(room: Room, call: Call, own: torch.Tensor) -> Begun:
    return on_int64(room, call, own, reduce_scatter_tensor)


def on_int64(room: Room, call: Call, own: torch.Tensor, begin_one: Begin) -> Begun:
    """Reduces integers of up to 63 significant bits: the operands as int64, times a factor.

    The operands are integers of at most 2**p in magnitude, for the p significand bits of the case's dtype. The factor
    is 2**(62 - p) + 1. The returned tensor is the reduction divided by the factor. If the division leaves a remainder,
    the reduction is wrong. The remainder is added to the quotient, so that the returned tensor is wrong too.
    """
    factor = 2 ** (62 - SIGNIFICAND_BITS[room.case.dtype]) + 1
    begun = begin_one(room, call, room.hand(own.to(torch.int64) * factor))

    def divided() -> torch.Tensor:
        result = begun.result()
        quotient = result.div(factor, rounding_mode="floor")
        return quotient.add_(result.remainder(factor)).to(own.dtype)

    return replace(begun, result=divided)


def waited(output: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, functional.wait_tensor(output))  # type: ignore[no-untyped-call]


FUNCTIONS: dict[str, Begin] = {
    function.__name__: function
    for function in (
        *PAIRS,
        *OBJECTS,
        barrier,
        monitored_barrier,
        *(all_reduce, all_gather, all_gather_into_tensor, reduce_scatter_tensor, reduce_scatter, broadcast),
        *(scatter, gather, reduce, all_to_all_single, all_to_all_single_uneven, all_to_all),
        *(functional_all_reduce, functional_all_gather_tensor, functional_reduce_scatter_tensor),
        *(functional_broadcast, functional_all_to_all_single, functional_all_to_all_single_uneven),
        *(functional_all_reduce_coalesced, functional_all_gather_into_tensor_coalesced),
        *(functional_reduce_scatter_tensor_coalesced, functional_all_reduce_inplace),
        *(functional_all_gather_tensor_inplace, functional_all_gather_inplace),
        *(functional_reduce_scatter_tensor_inplace, functional_all_to_all_inplace),
        *(functional_permute_tensor, functional_batch_p2p_ops_inplace),
        *(int64_all_reduce, int64_reduce, int64_reduce_scatter_tensor),
        *(coalesced_all_reduce, coalesced_all_gather_into_tensor, coalesced_reduce_scatter_tensor),
    )
}
"""Name of a case's function -> the function that begins its call."""
