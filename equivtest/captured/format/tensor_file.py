"""Reads and writes files of tensors in the safetensors format.

A file may come from an attacker, so nothing in the file is executed. When safetensors opens a file, it checks that the
header is valid and that every byte belongs to exactly one tensor. Source:
https://huggingface.co/docs/safetensors/index, "Format"; safetensors 0.8.0.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from equivtest.base import limits
from equivtest.errors import Misuse, reason_of, shorten

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
"""Name of a dtype in the format -> dtype.  A captured run has no other dtypes."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LENGTH_BYTES = 8
"""Size of the number at the beginning of a file, which is the length of the header."""


class Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def digest_of(tensor: torch.Tensor) -> str:
    """Returns the SHA-256 of a tensor's bytes in hexadecimal digits.  The tensor must be contiguous and on the CPU."""
    return hashlib.sha256(tensor.detach().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> int:
    """Writes contiguous CPU tensors to a file and returns the file's size in bytes.

    `path` appears only once the file is complete.

    Raises:
        OSError: the file cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        save_file({name: tensor.detach() for name, tensor in tensors.items()}, part)
        part.replace(path)
    except SafetensorError as error:  # safetensors raises it for a full disk
        raise OSError(f"{part}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    return path.stat().st_size


class TensorFile:
    """An opened file of tensors.  The header is checked, and each tensor is read on demand.

    Raises:
        Misuse: the file cannot be read, has another format, or is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_plainly(path) as file:
            self.size_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if limits.HEADER_BYTES < length <= self.size_bytes:
            raise Misuse(f"{path}: its header has {length} bytes, but the limit is {limits.HEADER_BYTES}")
        try:
            opened: Any = safe_open(path, "pt")
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (no mapping)
            self.entries = {name: Entry(each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
        except (SafetensorError, OSError) as error:
            raise Misuse(f"{path} is not a complete safetensors file: {error}") from error
        self._opened = opened
        for name, entry in self.entries.items():
            what = f"{path}: {name[: limits.NAME_CHARS]!r}"
            if entry.dtype not in DTYPES:
                raise Misuse(f"{what} is of dtype {entry.dtype[:16]!r}: a captured run may hold {', '.join(DTYPES)}")
            if len(entry.shape) > limits.CAPTURED_DIMS:
                raise Misuse(f"{what} has {len(entry.shape)} dims, but the limit is {limits.CAPTURED_DIMS}")

    def read(self, name: str) -> torch.Tensor:
        """Reads a tensor.  Raises Misuse if its bytes are no longer in the file, or are no values of its dtype."""
        try:
            read: torch.Tensor = self._opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise Misuse(
                f"{self.path}: tensor {name} cannot be read, although the file could be opened: {error}"
            ) from error
        largest = int(read.view(torch.uint8).max()) if read.dtype == torch.bool and read.numel() else 0
        if largest > 1:
            raise Misuse(f"{self.path}: tensor {name} is bool, but one of its bytes is {largest}, neither 0 nor 1")
        return read


@contextmanager
def open_plainly(path: Path) -> Iterator[BufferedReader]:
    """Opens a regular file for reading, without following links or waiting for a pipe or a device.

    Raises:
        Misuse: `path` is no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        is_link = path.is_symlink()
        raise Misuse(
            f"{path} is a link, which is never followed: put the file itself there"
            if is_link
            else f"{shorten(str(path))} cannot be read: {reason_of(error)}"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # open() raises for a folder
        os.close(descriptor)
        raise Misuse(f"{path} is not a regular file")
    with open(descriptor, "rb") as file:
        yield file
