"""Shows by DTensor alone that each wrong operator is wrong: `python -m tests.planted.shown [NAME ...]`."""

from __future__ import annotations

import sys
import tempfile
from types import ModuleType

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.planted.bare import (
    arithmetic,
    blind_arithmetic,
    blind_eighth,
    blind_fifth,
    blind_fourth,
    blind_ninth,
    blind_others,
    blind_seventh,
    blind_sixth,
    blind_views,
    join,
    operators,
    views,
)
from tests.planted.subjects import WRONG, wrong_torch

MODULES: tuple[ModuleType, ...] = (
    operators, arithmetic, views, blind_arithmetic, blind_views, blind_others,
    blind_fourth, blind_fifth, blind_sixth, blind_seventh, blind_eighth, blind_ninth,
)  # fmt: skip
"""Modules whose programs have the names of the wrong operators."""
WORLD_SIZES: dict[str, int] = {name: size for module in MODULES for name, size in module.WORLD_SIZES.items()}
"""Numbers of ranks that show a wrong operator, if two do not."""


def program(name: str) -> operators.Program:
    found: operators.Program = next(getattr(module, name) for module in MODULES if hasattr(module, name))
    return found


def _run(rank: int, folder: str, world_size: int, name: str) -> None:
    join(rank, world_size, folder)
    mesh = init_device_mesh("cpu", (world_size,))
    said = [_verdict(name, mesh)]
    with wrong_torch(WRONG[name]):
        said.append(_verdict(name, mesh))
    said.append(_verdict(name, mesh))
    if rank == 0:
        print(f"{name:36} before: {said[0]:6} planted: {said[1]:40.40} after: {said[2]}", flush=True)
    dist.destroy_process_group()


def _verdict(name: str, mesh: DeviceMesh) -> str:
    try:
        got, right = program(name)(mesh)
    except Exception as error:
        return f"raises {type(error).__name__} {str(error)[:100]!r}"
    if got.shape != right.shape or got.dtype != right.dtype:
        return f"{tuple(got.shape)} {got.dtype}"
    return "right" if torch.allclose(got, right) else f"{got.flatten().tolist()}"


if __name__ == "__main__":
    for name in sys.argv[1:] or WRONG:
        world_size = WORLD_SIZES.get(name, 2)
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_run, (folder, world_size, name), nprocs=world_size)
