"""Reads and writes the notes of a watched visit.

Each rank has one file, in which notes follow each other. A note is plain data.

Tensors in a note are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import torch

from equivtest.layout import Layout, parse_placement
from equivtest.tensors import at_rest, dtype_name

BEGUN, ENDED, RAISED = "begun", "ended", "raised"
COLLECTIVE, OPERATION, OPERATOR = "collective", "operation", "operator"


class Note(msgspec.Struct, frozen=True, array_like=True):
    """One entry in the file of a watched rank, which records that a call began, ended or raised.

    Attributes:
        number: Number of the call, from 0 on each rank.
        moment: BEGUN, ENDED or RAISED.
        kind: COLLECTIVE, OPERATION on plain tensors, or OPERATOR on DTensors.
        name: Method of a process group, or operator such as 'aten::mm.default'.
        given: The arguments of the call, converted by `packed`.
        got: Results of the call. For an operation or operator, these are the returned value and then the tensors to
            which the call wrote.
        group: For a collective, the world ranks of its group, in the group's order. For an operator, the ranks of its
            mesh.
        options: Further facts by name. The note of a call's beginning has 'phase' ('forward' or 'backward'). The end of
            an operator has 'order', its number among all calls. A collective has 'group_name', 'room' (the number of
            elements of each result) and 'numbers' (such as split sizes), and may have 'op' (the reduction), 'factor'
            (if 'op' is 'premul') and 'root'. A barrier has 'group_name' and 'clock' (the host whose clock gave `at_s`).
        was_changed: True if other code wrote to the operands between the call and its end.
        error: Text of the exception.
        at_s: For a barrier, the time of its call or of its end, by `time.monotonic` of the rank's host.
    """

    number: int
    moment: str
    kind: str = ""
    name: str = ""
    given: Any = None
    got: Any = None
    group: tuple[int, ...] = ()
    options: dict[str, Any] = {}
    was_changed: bool = False
    error: str = ""
    at_s: float = 0.0


@dataclass(frozen=True)
class Part:
    """One rank's local tensor of a DTensor, with the facts from which the whole tensor can be assembled.

    Attributes:
        shape: Shape of the whole tensor.
        ranks: World ranks of the DTensor's mesh, in row-major order.
    """

    local: torch.Tensor
    layout: Layout
    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Note)


def read_notes(path: Path) -> Iterator[Note]:
    """Yields the notes in a rank's file, without an incomplete last note. A missing file has no notes."""
    content = path.read_bytes() if path.exists() else b""
    start = 0
    while start + _HEAD <= len(content):
        stop = start + _HEAD + int.from_bytes(content[start : start + _HEAD], "little")
        if stop > len(content):  # the rank was killed while writing
            return
        yield _decoder.decode(content[start + _HEAD : stop])
        start = stop


def write_note(note: Note, file: IO[bytes]) -> None:
    """Appends a note and flushes the file, so that the note survives this process."""
    content = _encoder.encode(note)
    file.write(len(content).to_bytes(_HEAD, "little") + content)
    file.flush()


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"watched-{rank}"


_HEAD = 8  # bytes of a note's size


def packed(value: Any) -> Any:
    """Converts arguments of a call to plain data.

    A tensor becomes its dtype, shape and bytes. A dtype, a memory format or a layout becomes its name. Every device
    becomes the same entry {"device": ""}, because `unpacked` puts all tensors on the CPU.
    """
    if isinstance(value, torch.Tensor):
        return {"tensor": _packed_tensor(value)}
    if isinstance(value, Part):
        return {"part": _packed_part(value)}
    if isinstance(value, torch.dtype):
        return {"torch": dtype_name(value)}
    if isinstance(value, torch.memory_format | torch.layout):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": ""}
    if isinstance(value, list | tuple):
        return [packed(part) for part in value]
    return value if value is None or isinstance(value, bool | int | float | str) else {"unknown": str(type(value))}


def _packed_tensor(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    still = at_rest(tensor)
    return dtype_name(still.dtype), tuple(still.shape), bytes(still.reshape(-1).view(torch.uint8).numpy().data)


def _packed_part(part: Part) -> tuple[Any, ...]:
    placements = [str(placement) for placement in part.layout.placements]
    return _packed_tensor(part.local), placements, part.layout.shard_order, part.shape, part.mesh_shape, part.ranks


def unpacked(value: Any) -> Any:
    """Converts plain data from `packed` back to arguments. All tensors are on the CPU.

    Raises:
        ValueError: an argument was neither a tensor nor plain data, so `packed` has only noted its type.
    """
    if isinstance(value, list):
        return [unpacked(part) for part in value]
    if not isinstance(value, dict):
        return value
    [(kind, held)] = value.items()
    if kind == "tensor":
        return _unpacked_tensor(*held)
    if kind == "part":
        local, placements, order, *others = held
        layout = Layout(tuple(map(parse_placement, placements)), tuple(order))
        return Part(_unpacked_tensor(*local), layout, *map(tuple, others))
    if kind == "torch":
        return getattr(torch, held)
    if kind == "device":
        return torch.device("cpu")
    raise ValueError(f"a {held} is no plain data")


def _unpacked_tensor(dtype: str, shape: Sequence[int], content: bytes) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if not math.prod(shape):
        return torch.empty(tuple(shape), dtype=kind)
    return torch.frombuffer(bytearray(content), dtype=kind).reshape(tuple(shape))
