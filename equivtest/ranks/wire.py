"""Encodes replies of ranks as bytes, with names, layouts and the raw memory of tensors. Nothing is pickled."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import os
import tempfile
from pathlib import Path

import msgspec
import torch

from equivtest.base import limits
from equivtest.base.collective import Collective
from equivtest.layout import Layout, parse_placement
from equivtest.ranks.reply import Answer, Outcome, Reply
from equivtest.tensors import Placed, at_rest, dtype_name

_ALIGNMENT_BYTES = 64


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor without its bytes, which are in the reply's payload from offset `start` on.

    `indices` is the offset in the payload at which the indices of the tensor's elements start. It is None if the
    tensor's layout determines the positions of its elements.
    """

    start: int
    dtype: str
    shape: tuple[int, ...]
    placements: tuple[str, ...]
    shard_order: tuple[int, ...]
    global_shape: tuple[int, ...] | None
    indices: int | None = None


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    tensors: dict[str, _Tensor]
    requires_grad: dict[str, bool]
    touched: tuple[str, ...]
    again: dict[str, _Tensor]
    collectives: tuple[Collective, ...] | None


class _Reply(msgspec.Struct, frozen=True, array_like=True):
    """A reply without the bytes of its tensors. The bytes are in `payload`, or in the file with the name `file`."""

    request_id: int
    rank: int
    outcome: Outcome
    answers: tuple[_Answer, ...]
    error_type: str
    error_text: str
    detail: str
    at_s: float
    busy_s: float
    lacking: tuple[str, ...]
    imported: tuple[str, ...]
    modules: tuple[str, ...]
    payload: bytearray
    file: str


_AS_THEY_ARE = tuple(field.name for field in dataclasses.fields(Reply) if field.name != "answers")
"""Fields of a reply that encoding does not change."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Reply | bytes)


def encode_reply(request_id: int, reply: Reply, scratch: Path | None) -> bytes:
    """Encodes a reply as a message.

    More than limits.SHARED_BYTES of tensors go to a file in `scratch`. They stay in the message if the file has no
    room, or if `scratch` is None because the two ends share no directory.
    """
    payload = bytearray()
    answers = tuple(
        _Answer(
            {name: _pack(placed, payload) for name, placed in answer.tensors.items()},
            dict(answer.requires_grad),
            answer.touched,
            {name: _pack(placed, payload) for name, placed in answer.again.items()},
            answer.collectives,
        )
        for answer in reply.answers
    )
    file = ""
    if scratch is not None and len(payload) > limits.SHARED_BYTES:
        with contextlib.suppress(OSError):
            file = _write(payload, scratch)
            payload = bytearray()
    as_they_are = {name: getattr(reply, name) for name in _AS_THEY_ARE}
    return _encoder.encode(_Reply(request_id=request_id, answers=answers, payload=payload, file=file, **as_they_are))


def encode_notes(notes: bytes) -> bytes:
    return _encoder.encode(notes)


def decode_message(message: bytes) -> tuple[int, Reply] | bytes:
    """Decodes a message of a rank. The result is (request id, reply), or the bytes of notes.

    If the reply's tensors are in a file, the file is mapped into memory and removed.

    Raises:
        ValueError: neither `encode_reply` nor `encode_notes` wrote the message.
    """
    data = _decoder.decode(message)
    if isinstance(data, bytes):
        return data
    payload = _map(Path(data.file)) if data.file else data.payload
    answers = tuple(
        Answer(
            {name: _unpack(tensor, payload) for name, tensor in answer.tensors.items()},
            answer.requires_grad,
            answer.touched,
            {name: _unpack(tensor, payload) for name, tensor in answer.again.items()},
            answer.collectives,
        )
        for answer in data.answers
    )
    return data.request_id, Reply(answers=answers, **{name: getattr(data, name) for name in _AS_THEY_ARE})


def _pack(placed: Placed, payload: bytearray) -> _Tensor:
    local, layout = at_rest(placed.local), placed.layout
    return _Tensor(
        _append(local, payload),
        dtype_name(local.dtype),
        tuple(local.shape),
        tuple(str(placement) for placement in layout.placements),
        layout.shard_order,
        placed.global_shape,
        None if placed.indices is None else _append(at_rest(placed.indices), payload),
    )


def _append(tensor: torch.Tensor, payload: bytearray) -> int:
    """Appends the tensor's memory to `payload`, aligned for any dtype, and returns the offset at which it starts."""
    payload += bytes(-len(payload) % _ALIGNMENT_BYTES)
    start = len(payload)
    if tensor.numel():
        payload += tensor.reshape(-1).view(torch.uint8).numpy().data
    return start


def _unpack(tensor: _Tensor, payload: bytearray | mmap.mmap) -> Placed:
    """Builds the tensor on the memory of `payload`, without a copy.

    Raises:
        ValueError: torch has no such dtype, or the tensor exceeds the payload.
    """
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {tensor.dtype!r}")
    local = _read(payload, tensor.start, dtype, tensor.shape)
    layout = Layout(tuple(parse_placement(text) for text in tensor.placements), tensor.shard_order)
    indices = None if tensor.indices is None else _read(payload, tensor.indices, torch.int64, tensor.shape)
    return Placed(local, layout, tensor.global_shape, indices)


def _read(payload: bytearray | mmap.mmap, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    numel = math.prod(shape)
    if not numel:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(payload, dtype=dtype, count=numel, offset=start).reshape(shape)


def _write(payload: bytearray, scratch: Path) -> str:
    handle, path = tempfile.mkstemp(prefix="reply-", dir=scratch)
    try:
        with open(handle, "wb") as file:
            file.write(payload)
    except OSError:  # no room: remove the partial file
        os.unlink(path)
        raise
    return path


def _map(path: Path) -> mmap.mmap:
    handle = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(handle)
        path.unlink()
