"""Files of tensors in the safetensors format, read as if somebody hostile had written them: nothing in them is run.

A file is 8 bytes that say how long the header is, the header, and the tensors' bytes.  The header is JSON: of each name
the dtype, the shape, and where its bytes begin and end.  Every byte belongs to exactly one tensor.

Source: https://huggingface.co/docs/safetensors/index, "Format".
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

import msgspec
import torch

from equivtest import limits
from equivtest.errors import Misuse

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
"""The dtypes that a run may hold, by the format's names."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LENGTH_BYTES = 8


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's memory; it is contiguous and on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def digest_of(tensor: torch.Tensor) -> str:
    """SHA-256 of the tensor's bytes, in hexadecimal digits."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> int:
    """Writes contiguous tensors of the CPU, and gives the size of the file in bytes; `path` has it when it is whole.

    Raises:
        OSError: it cannot be written.
    """
    header, start = {}, 0
    for name, tensor in tensors.items():
        stop = start + tensor.nbytes
        header[name] = Entry(NAMES[tensor.dtype], tuple(tensor.shape), (start, stop))
        start = stop
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % LENGTH_BYTES)
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
            for tensor in tensors.values():
                file.write(bytes_of(tensor))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return LENGTH_BYTES + len(text) + start


class TensorFile:
    """A file of tensors whose header has been checked; each tensor is read when it is asked for.

    Attributes:
        entries: Of each tensor what the header says, by name.
        size_bytes: Of the file.

    Raises:
        Misuse: the file cannot be read, is no such file, or is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_plainly(path) as file:
            self.size_bytes = os.fstat(file.fileno()).st_size
            self._start, self.entries = _read_header(path, file, self.size_bytes)

    def read(self, name: str) -> torch.Tensor:
        """The tensor of that name.

        Raises:
            Misuse: its bytes are not there, or are no values of its dtype.
        """
        entry = self.entries[name]
        start, stop = entry.data_offsets
        data = bytearray(stop - start)
        with open_plainly(self.path) as file:
            file.seek(self._start + start)
            if file.readinto(data) != len(data):
                raise Misuse(f"{self.path} is cut off within {name}: copy it again")
        dtype = DTYPES[entry.dtype]
        if not data:
            return torch.empty(entry.shape, dtype=dtype)
        read = torch.frombuffer(data, dtype=torch.uint8)
        if dtype == torch.bool and int(read.max()) > 1:
            raise Misuse(f"{self.path}: {name} is of bool and holds a byte of {int(read.max())}, neither 0 nor 1")
        return read.view(dtype).reshape(entry.shape)


@contextmanager
def open_plainly(path: Path) -> Iterator[BufferedReader]:
    """A regular file, open for reading; links are not followed, and nothing else is waited for.

    Raises:
        Misuse: there is none.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        is_link = path.is_symlink()
        raise Misuse(
            f"{path} is a link, which is never followed: put the file itself there"
            if is_link
            else f"{path} cannot be read: {error.strerror}"
        ) from error
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise Misuse(f"{path} is no regular file")
        yield file


def _read_header(path: Path, file: BufferedReader, size_bytes: int) -> tuple[int, dict[str, Entry]]:
    """Where the tensors' bytes begin, and what is said of each tensor."""
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    room = size_bytes - LENGTH_BYTES
    if not 2 <= length <= max(0, room):
        raise Misuse(f"{path} is no safetensors file, or cut off: a header of {length} bytes in {size_bytes} bytes")
    if length > limits.HEADER_BYTES:
        raise Misuse(f"{path}: its header has {length} bytes, at most {limits.HEADER_BYTES} are read")
    text = file.read(length)
    try:
        entries = msgspec.json.decode(text, type=dict[str, Entry])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Misuse(f"{path} is no safetensors file of a run: its header is broken: {error}") from error
    _check_entries(path, entries, room - length)
    return LENGTH_BYTES + length, entries


def _check_entries(path: Path, entries: Mapping[str, Entry], num_bytes: int) -> None:
    """Raises Misuse unless every byte belongs to one tensor, and each has as many as its shape takes."""
    place = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        what = f"{path}: {name[: limits.NAME_CHARS]!r}"
        if entry.dtype not in DTYPES:
            raise Misuse(f"{what} is of dtype {entry.dtype[:16]!r}: a run holds {', '.join(DTYPES)}")
        if len(entry.shape) > limits.CAPTURED_DIMS or any(size < 0 for size in entry.shape):
            raise Misuse(f"{what} has the shape {entry.shape[: limits.CAPTURED_DIMS]}, which no tensor has")
        if start != place or stop - start != math.prod(entry.shape) * DTYPES[entry.dtype].itemsize:
            raise Misuse(
                f"{what} of shape {entry.shape} and dtype {entry.dtype} is said to lie in bytes {start} to {stop}, and "
                f"must begin at {place} and have as many as its shape takes"
            )
        place = stop
    if place != num_bytes:
        raise Misuse(
            f"{path} holds {num_bytes} bytes of tensors, its header speaks of {place}: it is cut off, or mixed up"
        )
