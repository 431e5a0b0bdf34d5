"""Draws the random integers that a mode, a seed and a tensor's name determine: the same in every process.

Nothing here reads or moves torch's global generator.

Source: torch.Generator, torch.randint (2.13.0); the CPU generator's sequence is fixed by its seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch


def hash_of(mode: str, seed: int, name: str) -> int:
    """Returns a number of 63 bits, a hash of the arguments, which is the same in every process."""
    digest = hashlib.blake2b(f"{mode}/{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(mode: str, seed: int, name: str) -> torch.Generator:
    """Returns a separate CPU generator for one tensor of one draw."""
    return torch.Generator(device="cpu").manual_seed(hash_of(mode, seed, name))


def odd_integers(shape: Sequence[int], low: int, high: int, source: torch.Generator) -> torch.Tensor:
    """Draws odd integers of random sign with magnitudes in low..high, int64; low and high are odd."""
    half = (high - low) // 2 + 1
    odd = torch.randint(-half, half, tuple(shape), generator=source, device="cpu").mul_(2).add_(1)
    return odd if low == 1 else odd.add_(odd.sign(), alpha=low - 1)


def signs(shape: Sequence[int], source: torch.Generator) -> torch.Tensor:
    """Draws +1 and -1 at random, int64."""
    return odd_integers(shape, 1, 1, source)


def permutation(length: int, source: torch.Generator) -> torch.Tensor:
    """Draws 0..length - 1 in random order: (length,), int64."""
    return torch.randperm(length, generator=source, device="cpu")


def odd_floor(number: int) -> int:
    """Returns the largest odd integer up to `number`, which is at least 1."""
    return number - 1 + number % 2


def other_dtype(name: str) -> torch.dtype:
    """Returns another dtype than the named one: float32 for 'float64', else float64."""
    return torch.float32 if name == "float64" else torch.float64
