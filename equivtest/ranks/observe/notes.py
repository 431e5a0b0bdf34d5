"""What a rank notes of a watched visit: plain data, one note after the other in a file, tensors as their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import torch

from equivtest.tensors import at_rest, dtype_name

BEGUN, ENDED, RAISED = "begun", "ended", "raised"
COLLECTIVE, OPERATION = "collective", "operation"


class Note(msgspec.Struct, frozen=True, array_like=True):
    """One line of a rank's file.

    Attributes:
        number: Of what is noted, from 0 on each rank.
        moment: BEGUN, ENDED or RAISED.
        kind: COLLECTIVE or OPERATION.
        name: Of the method of a process group, or of the operator: 'aten::mm.default'.
        given: The arguments of what begins, as `packed`.
        got: What a collective left in its results; what an operation returned, then what it wrote to.
        group: Ranks of the world that the collective's group has, in its order.
        options: Of a collective: 'op', 'factor' of a 'premul', 'root', 'phase', 'group_name', the elements of each
            result as 'room', and the like.
        was_changed: Whether something else wrote to the operands in the meantime.
        error: What was raised.
        at_s: When a barrier was called, and when it had been waited for: `time.monotonic` of the rank's host.
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


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Note)


def read_notes(path: Path) -> Iterator[Note]:
    """What a rank has written, up to where it ended; nothing where it wrote nothing."""
    content = path.read_bytes() if path.exists() else b""
    start = 0
    while start + _HEAD <= len(content):
        stop = start + _HEAD + int.from_bytes(content[start : start + _HEAD], "little")
        if stop > len(content):  # the rank was killed while it wrote
            return
        yield _decoder.decode(content[start + _HEAD : stop])
        start = stop


def write_note(note: Note, file: IO[bytes]) -> None:
    """Appends a note, so that it is there whatever becomes of this process."""
    content = _encoder.encode(note)
    file.write(len(content).to_bytes(_HEAD, "little") + content)
    file.flush()


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"watched-{rank}"


_HEAD = 8  # bytes of a note's size


def packed(value: Any) -> Any:
    """Arguments as plain data: tensors with their bytes, dtypes and the like by name; devices are left out."""
    if isinstance(value, torch.Tensor):
        return {"tensor": _packed_tensor(value)}
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


def unpacked(value: Any) -> Any:
    """What `packed` was given, on the CPU.

    Raises:
        ValueError: it was neither a tensor nor plain data.
    """
    if isinstance(value, list):
        return [unpacked(part) for part in value]
    if not isinstance(value, dict):
        return value
    [(kind, held)] = value.items()
    if kind == "tensor":
        return _unpacked_tensor(*held)
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
