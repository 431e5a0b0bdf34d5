"""Captures a step of your training job on every rank, in a folder that `equivtest judge` reads."""

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
from equivtest.captured.write.keeper import Keeper
from equivtest.captured.write.update_keeper import UpdateKeeper
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
    """Writes this rank's tensors of every forward and backward of `module` that runs within the block.

    If the block calls the module several times, each call is a micro-batch with its backward, and gradients add up.
    Every rank of the job must enter and leave the block, and make the same number of calls.  Gradients are read when
    the block ends, so end the block before you clip the gradients or update the parameters.  A block that raises writes
    no file.

    Args:
        module: The parallel module, as the job calls it.
        folder: Each rank writes two files into this folder. If hosts share no folder, collect the files afterwards.
        boundaries: Patterns (`fnmatch`) of the names of the submodules to capture, in the unsharded module's names,
            such as 'layers.*.mlp'.
        outputs: Names of the outputs to capture, as in `Judge`. If empty, all outputs are captured.
        batch: 'whole', 'mean of parts' or 'sum of parts', as in `program`. If None, the batch is 'mean of parts' if the
            module contains DistributedDataParallel, fully_shard or a similar wrapper, and 'whole' if it does not.
        batch_axis: The axis of the mesh along which the batch is divided. If '', this is the first axis.
        mesh: The mesh of all ranks of the job. If None, this is the mesh of the module's DTensors. If the module has no
            DTensor either, all ranks lie along one axis.
        placed: A function that returns which elements of a plain parameter a rank has, as in `Judge`. If None, each
            plain parameter is the whole parameter.
        shapes: Shapes of the unsharded module's parameters by name, if the parallel module does not show these shapes.
        alone: Patterns of the names of submodules to capture alone. Each of these submodules gets a folder, with its
            name, in `folder`, and is judged alone, so that the whole module need not fit into memory. The computation
            between these submodules is not judged.
        limit_bytes: The largest number of bytes that one rank may write.

    Raises:
        Misuse: the folder has another run, parameters have gradients before the block, the module is not called, a call
            does not have exactly one backward, a call has an argument that is no tensor, or a rank would write more
            than the limit.
    """
    require(isinstance(module, nn.Module), f"capture takes the module that the job calls, got {type(module).__name__}")
    job = _job_of(module, batch, batch_axis, mesh, placed, shapes, limit_bytes)
    parts = [("", module)]
    if alone:
        parts = [(path, part) for path, part in parts_of(module) if any(fnmatchcase(path, each) for each in alone)]
        require(bool(parts), f"alone= must name submodules of the module, but {', '.join(alone)} matches none")
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
    """Writes this rank's tensors of the one `optimizer.step()` that runs within the block.

    When the update begins, after accumulation, unscaling and clipping, this rank's shards of the parameters, the
    gradients and the optimizer's state are copied. When the block ends, the parameters and the state are copied again.
    Every rank of the job must enter and leave the block.

    Args:
        module: The parallel module. The optimizer updates its parameters.
        optimizer: A torch.optim.Optimizer, not a wrapper around one.
        folder, mesh, placed, shapes, limit_bytes: Same as in `capture`. The folder must not contain a run that
            `capture` has written.

    Raises:
        Misuse: the folder has another run, the step does not run exactly once, a folder cannot store the optimizer's
            options or state, or a rank would write more than the limit.
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
    parameters, world = by_own_name(module, module.named_parameters()), Group()
    mesh = mesh or _widest_mesh(parameters.values())
    ranks = None if mesh is None else mesh.mesh.flatten().tolist()
    require(
        ranks is None or ranks == list(range(world.size)),
        f"the mesh must have all {world.size} ranks of the job in order, got {ranks}: pass such a mesh, capture(mesh=)",
    )
    axes = axes_of(mesh)
    require(
        not batch_axis or batch_axis in axes,
        f"batch_axis must be one of axes {', '.join(axes) or 'none'}, got {batch_axis!r}",
    )
    divides = is_data_parallel(module, shape_of(mesh, world)[axes.index(batch_axis) if batch_axis else 0])
    batches = [each for each in BATCHES if each != PARTS_OF_WHOLE]
    require(batch is None or batch in batches, f"batch must be one of {', '.join(batches)} or None, got {batch!r}")
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
    """Checks together with all ranks that every rank can write its tensors, and prints their size.

    Raises:
        Misuse: some rank has a problem, or would write more than the limit. Every rank raises, so that none waits.
    """
    ranks = job.world.all_of((job.size_bytes, problem))
    sizes, problems = [size for size, _ in ranks], [(rank, text) for rank, (_, text) in enumerate(ranks) if text]
    require(not problems, "".join(f"rank {rank}: {text}" for rank, text in problems[:1]))
    largest = sizes.index(max(sizes))
    require(
        max(sizes) <= job.limit_bytes,
        f"rank {largest} would write {_in_words(max(sizes))}, but the limit is {_in_words(job.limit_bytes)}: name "
        "fewer submodules, capture(boundaries=['layers.0.*']), or raise limit_bytes=",
    )
    if job.world.rank == 0:
        sys.stderr.write(
            f"equivtest: {len(sizes)} ranks write {_in_words(sum(sizes))} into {folder}, one rank at most "
            f"{_in_words(max(sizes))}\n"
        )


def _widest_mesh(tensors: Iterable[torch.Tensor]) -> DeviceMesh | None:
    meshes = [each.device_mesh for each in tensors if isinstance(each, DTensor)]
    return max(meshes, key=lambda mesh: (mesh.size(), mesh.ndim), default=None)


def _in_words(num_bytes: int) -> str:
    exponent = min(4, max(0, int(math.log2(max(1, num_bytes)) // 10)))
    return f"{num_bytes / 1024**exponent:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[exponent]}"
