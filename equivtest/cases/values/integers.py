"""Draws random integers that depend only on a mode, a seed and a tensor's name, and so are equal in every process.

No function of this module reads or changes torch's global generator.

Source: torch.Generator, torch.randint (2.13.0); the CPU generator's sequence is fixed by its seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch


def hash_of(mode: str, seed: int, name: str) -> int:
    """Returns a number of 63 bits, which is the same in every process."""
    digest = hashlib.blake2b(f"{mode}/{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(mode: str, seed: int, name: str) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(hash_of(mode, seed, name))


def odd_integers(shape: Sequence[int], low: int, high: int, source: torch.Generator) -> torch.Tensor:
    """Draws int64 odd integers of random sign, with magnitudes from `low` to `high`. Both limits must be odd."""
    half = (high - low) // 2 + 1
    odd = torch.randint(-half, half, tuple(shape), generator=source, device="cpu").mul_(2).add_(1)
    return odd if low == 1 else odd.add_(odd.sign(), alpha=low - 1)


def signs(shape: Sequence[int], source: torch.Generator) -> torch.Tensor:
    return odd_integers(shape, 1, 1, source)


def permutation(length: int, source: torch.Generator) -> torch.Tensor:
    return torch.randperm(length, generator=source, device="cpu")


def odd_floor(number: int) -> int:
    return number - 1 + number % 2


def other_dtype(name: str) -> torch.dtype:
    return torch.float32 if name == "float64" else torch.float64
