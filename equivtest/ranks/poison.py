"""Fills uninitialised memory, so that code that reads it gets wrong values.

    large  glibc fills the memory that malloc returns with one byte, which makes large finite numbers; nothing
           else changes.  With another C library this does nothing: `poison_in_words` says so.
    nan    torch fills its own uninitialised tensors with NaN, but only in its deterministic mode,
           which chooses other kernels too.
    none   neither of the two: memory keeps its old contents.

Source: mallopt(3), M_PERTURB: malloc fills with the complement of the byte set; glibc manual,
"Memory Allocation Tunables": malloc does not fill memory from the per-thread cache, hence
glibc.malloc.tcache_count=0, which a process reads when it begins.
torch.utils.deterministic.fill_uninitialized_memory (torch 2.13.0).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

LARGE_BYTE = 0x7B
"""Byte that fills memory: repeated, it is 61,280 in float16, about 1e36 in bfloat16 and float32, 4e286 in float64."""

_M_PERTURB = -6  # of mallopt(3)
_NO_CACHE = "glibc.malloc.tcache_count=0"
_TUNABLES = "GLIBC_TUNABLES"


def poison_environment(environment: Mapping[str, str]) -> dict[str, str]:
    given = environment.get(_TUNABLES, "")
    return {_TUNABLES: given if _NO_CACHE in given else f"{given}:{_NO_CACHE}".lstrip(":")}


def poison_in_words() -> str:
    if _mallopt() is None:
        return "nan by torch; large does nothing: the C library has no mallopt with M_PERTURB"
    return f"nan by torch; large by glibc's malloc, byte {LARGE_BYTE:#x}"


@contextmanager
def poisoned(poison: str) -> Iterator[None]:
    """Fills new memory of this process in the way that `poison` names, while the context lasts.

    After the context malloc keeps filling memory until the next visit begins. To stop earlier would be an error,
    because a thread that is within calloc at that moment may get memory that is not zero (glibc 2.36), and the threads
    that run collectives use calloc.  When the next visit begins, these threads have been idle since all ranks answered
    the last visit.
    """
    mallopt = _mallopt()
    if mallopt is not None:
        mallopt(_M_PERTURB, LARGE_BYTE ^ 0xFF if poison == "large" else 0)
    with _filled_by_torch() if poison == "nan" else nullcontext():
        yield


@contextmanager
def _filled_by_torch() -> Iterator[None]:
    """Makes torch fill uninitialised tensors while the context lasts. This needs torch's deterministic mode.

    An operation that is not deterministic only warns, and still runs.
    """
    import torch

    settings: Any = torch.utils.deterministic  # a module with properties, which mypy does not see
    mode, fill = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)  # noqa: FBT003
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fill


@cache
def _mallopt() -> Any:
    """Returns glibc's mallopt, or None for another C library. (musl has no mallopt, and macOS has no M_PERTURB.)"""
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  (glibc alone has it)
        return libc.mallopt
    except (OSError, AttributeError, TypeError):
        return None
