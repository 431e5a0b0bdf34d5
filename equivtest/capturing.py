"""What every rank of anybody's job held in its forwards and backwards, written into a folder for `equivtest judge`."""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from equivtest.base import limits
from equivtest.captured.write.group import Group
from equivtest.captured.write.job import Job, PlacedBy, axes_of, shape_of
from equivtest.captured.write.kept import Keeper
from equivtest.captured.write.kept_update import UpdateKeeper
from equivtest.cases.case import Shape, require
from equivtest.errors import Misuse
from equivtest.programs.boundaries import parts_of
from equivtest.programs.case import BATCHES, MEAN_OF_PARTS, PARTS_OF_WHOLE, WHOLE
from equivtest.programs.names import by_own_name
from equivtest.programs.run.module import is_data_parallel


@contextmanager
def capture(
    module: nn.Module,
    folder: str | Path,
    *,
    boundaries: Sequence[str] = ("*",),
    outputs: Sequence[str] = (),
    batch: str | None = None,
    batch_axis: str = "",
    mesh: DeviceMesh | None = None,
    placed: PlacedBy | None = None,
    shapes: Mapping[str, Shape] | None = None,
    alone: Sequence[str] = (),
    limit_bytes: int = limits.CAPTURED_BYTES,
) -> Iterator[None]:
    """Writes what this rank holds in the forward and backward of `module` that run within the block.

    Where the module is called several times each call is a micro-batch with a backward of its own, and gradients add
    up.  Every rank of the job enters and leaves the block, and calls the module as often.  Gradients are read where the
    block ends, so that it ends before they are clipped or the parameters are updated.  Nothing is written where it
    raises.

    Args:
        module: The parallel module, as the job calls it.
        folder: Where each rank writes two files of its own; hosts without a common folder collect them afterwards.
        boundaries: Patterns (`fnmatch`) of the names of those submodules whose tensors are kept, by the unsharded
            module's names, such as 'layers.*.mlp'.
        outputs: Which of several outputs are kept, as of `module_property`; empty: all.
        batch: As of `module_property`: 'whole', 'mean of parts' or 'sum of parts'; None: 'mean of parts' where
            DistributedDataParallel, fully_shard or the like is in the module, else 'whole'.
        batch_axis: Along which axis of the mesh a divided batch is divided; '': the first.
        mesh: Of all ranks of the job; None: that of the module's DTensors, else all ranks along one axis.
        placed: Says of a parameter that is held as a plain tensor which elements of the whole a rank has, as of
            `module_property`, here as a function.  Without it a plain parameter is the whole.
        shapes: Of the unsharded module's parameters, where the parallel one does not say them: by name.
        alone: Patterns of the names of submodules that are captured each by itself, into a folder of its name in
            `folder`, and nothing else: each is then judged alone, so that the whole never has to fit into memory.  What
            the module computes between them is not judged.
        limit_bytes: What one rank writes at most.

    Raises:
        Misuse: there is another run in the folder, gradients are left from before, the module is not called, some call
            has not one backward or takes what is no tensor, or a rank would write more than the limit.
    """
    require(isinstance(module, nn.Module), f"capture takes the module that the job calls, got {type(module).__name__}")
    job = _job_of(module, batch, batch_axis, mesh, placed, shapes, limit_bytes)
    parts = [("", module)]
    if alone:
        parts = [(path, part) for path, part in parts_of(module) if any(fnmatchcase(path, each) for each in alone)]
        require(bool(parts), f"alone must name submodules, {', '.join(alone)} names none")
    keepers = [
        Keeper(job, path, part, Path(folder) / path, tuple(boundaries), () if alone else tuple(outputs))
        for path, part in parts
    ]
    with _kept(job, Path(folder), keepers):
        yield


@contextmanager
def capture_update(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: str | Path,
    *,
    mesh: DeviceMesh | None = None,
    placed: PlacedBy | None = None,
    shapes: Mapping[str, Shape] | None = None,
    limit_bytes: int = limits.CAPTURED_BYTES,
) -> Iterator[None]:
    """Writes what this rank holds in the one `optimizer.step()` that runs within the block.

    That is its part of the parameters, the gradients and the optimizer's state when the update begins, so after
    accumulation, unscaling and clipping, and the parameters and the state when the block ends.  Every rank of the job
    enters and leaves the block.

    Args:
        module: The parallel module, whose parameters are updated.
        optimizer: One of torch.optim, as it is called, and no wrapper of one.
        folder, mesh, placed, shapes, limit_bytes: As of `capture`; another folder than that of a forward and backward.

    Raises:
        Misuse: there is another run in the folder, there is not one update, or it is none that a folder holds, or a
            rank would write more than the limit.
    """
    require(
        isinstance(optimizer, torch.optim.Optimizer),
        f"capture_update takes the torch.optim.Optimizer that the job calls, got {type(optimizer).__name__}",
    )
    job = _job_of(module, WHOLE, "", mesh, placed, shapes, limit_bytes)
    with _kept(job, Path(folder), [UpdateKeeper(job, optimizer, Path(folder))]):
        yield


@contextmanager
def _kept(job: Job, folder: Path, keepers: Sequence[Keeper]) -> Iterator[None]:
    """Has each keep what runs within the block, and write it."""
    try:
        for keeper in keepers:
            keeper.begin()
        yield
    finally:
        for keeper in keepers:
            keeper.end()
    problem = ""
    try:
        for keeper in keepers:
            keeper.finish()
    except Misuse as error:
        problem = str(error)
    _agree(job, folder, problem)
    for keeper in keepers:
        keeper.write()


def _job_of(
    module: nn.Module,
    batch: str | None,
    batch_axis: str,
    mesh: DeviceMesh | None,
    placed: PlacedBy | None,
    shapes: Mapping[str, Shape] | None,
    limit_bytes: int,
) -> Job:
    """What the options say of the job, and what its module does.

    Raises:
        Misuse: an option says what cannot be.
    """
    parameters, world = by_own_name(module, module.named_parameters()), Group()
    mesh = mesh or _widest_mesh(parameters.values())
    ranks = None if mesh is None else mesh.mesh.flatten().tolist()
    require(
        ranks is None or ranks == list(range(world.size)),
        f"mesh must have all {world.size} ranks of the job in order, got {ranks}: capture(mesh=) says it",
    )
    axes = axes_of(mesh)
    require(
        not batch_axis or batch_axis in axes,
        f"batch_axis must be one of axes {', '.join(axes) or 'none'}, got {batch_axis!r}",
    )
    divides = is_data_parallel(module, shape_of(mesh, world)[axes.index(batch_axis) if batch_axis else 0])
    known = [each for each in BATCHES if each != PARTS_OF_WHOLE]
    require(batch is None or batch in known, f"batch must be one of {', '.join(known)} or None, got {batch!r}")
    return Job(
        module=module,
        world=world,
        run=world.from_first(secrets.token_hex(16)),
        mesh=mesh,
        batch=batch or (MEAN_OF_PARTS if divides else WHOLE),
        batch_axis=batch_axis,
        placed=placed,
        shapes=shapes or {name: tuple(each.shape) for name, each in parameters.items()},
        limit_bytes=limit_bytes,
    )


def _agree(job: Job, folder: Path, problem: str) -> None:
    """Says how much all ranks are about to write.

    Raises:
        Misuse: some rank has a problem, or would write more than the limit; on every rank alike, so that none waits.
    """
    told = job.world.all_of((job.size_bytes, problem))
    sizes, problems = [size for size, _ in told], [(rank, text) for rank, (_, text) in enumerate(told) if text]
    require(not problems, "".join(f"rank {rank}: {text}" for rank, text in problems[:1]))
    largest = sizes.index(max(sizes))
    require(
        max(sizes) <= job.limit_bytes,
        f"rank {largest} would write {_in_words(max(sizes))}, at most {_in_words(job.limit_bytes)} are written: name "
        "fewer parts, capture(boundaries=['layers.0.*']), or say limit_bytes=",
    )
    if job.world.rank == 0:
        sys.stderr.write(
            f"equivtest: {len(sizes)} ranks write {_in_words(sum(sizes))}, one at most {_in_words(max(sizes))}, into "
            f"{folder}\n"
        )


def _widest_mesh(tensors: Iterable[torch.Tensor]) -> DeviceMesh | None:
    meshes = [each.device_mesh for each in tensors if isinstance(each, DTensor)]
    return max(meshes, key=lambda mesh: (mesh.size(), mesh.ndim), default=None)


def _in_words(num_bytes: int) -> str:
    """'1.5 MiB'."""
    exponent = min(4, max(0, int(math.log2(max(1, num_bytes)) // 10)))
    return f"{num_bytes / 1024**exponent:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[exponent]}"
