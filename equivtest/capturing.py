"""What every rank of anybody's job held in one forward and backward, written into a folder for `equivtest judge`."""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from equivtest import __version__, limits
from equivtest.captured.folder import INDICES, paths_of
from equivtest.captured.group import Group
from equivtest.captured.manifest import Manifest, Parameter, Tensor
from equivtest.captured.tensor_file import NAMES, digest_of, write_tensors
from equivtest.errors import Misuse
from equivtest.families.module.case import BATCHES, MEAN_OF_PARTS, PARTS_OF_WHOLE, WHOLE
from equivtest.families.module.case_boundaries import own_name
from equivtest.families.module.subject import is_data_parallel
from equivtest.families.module.subject.recording import PartsMet, WholeMet, named_inputs
from equivtest.files import write_whole
from equivtest.kit.case import Shape, require
from equivtest.ranks.visit import layout_of, waited
from equivtest.tensors import dtype_name, same_bits

PlacedBy = Callable[[nn.Module, str], "tuple[torch.Tensor, torch.Tensor] | None"]
"""(module, name of a parameter) -> what this rank holds of it, and of each element its place in the flattened whole."""


class Kept(NamedTuple):
    """A copy of one tensor on the CPU, and what its rank says of it."""

    local: torch.Tensor
    layout: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    whole: Shape | None = None
    requires_grad: bool = False
    indices: torch.Tensor | None = None


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
    limit_bytes: int = limits.CAPTURED_BYTES,
) -> Iterator[Capturing]:
    """Writes what this rank holds in the one forward and backward of `module` that run within the block.

    Every rank of the job enters and leaves the block.  Gradients are read where it ends, so that it ends before they
    are clipped or the parameters are updated.  Nothing is written where the block raises.

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
        limit_bytes: What one rank writes at most.

    Raises:
        Misuse: there is another run in the folder, gradients are left from before, the module is not called once or
            takes what is no tensor, or a rank would write more than the limit.
    """
    capturing = Capturing(module, Path(folder), tuple(boundaries), tuple(outputs), mesh, placed, shapes, limit_bytes)
    capturing.begin(batch, batch_axis)
    try:
        yield capturing
    finally:
        capturing.end()
    capturing.write()


class Capturing:
    """One rank's part of a run.

    Attributes:
        size_bytes: Of what is kept so far, or would be without the limit.
    """

    def __init__(
        self,
        module: nn.Module,
        folder: Path,
        boundaries: tuple[str, ...],
        outputs: tuple[str, ...],
        mesh: DeviceMesh | None,
        placed: PlacedBy | None,
        shapes: Mapping[str, Shape] | None,
        limit_bytes: int,
    ) -> None:
        require(
            isinstance(module, nn.Module), f"capture takes the module that the job calls, got {type(module).__name__}"
        )
        self.size_bytes = 0
        self._module, self._folder, self._outputs = module, folder, outputs
        self._boundaries, self._placed, self._limit_bytes = boundaries, placed, limit_bytes
        self._parameters = {own_name(name): tensor for name, tensor in module.named_parameters()}
        self._shapes = dict(shapes or {name: tuple(each.shape) for name, each in self._parameters.items()})
        self._mesh = mesh or _widest_mesh(self._parameters.values())
        self._world = Group()
        self._mesh_shape = tuple(self._mesh.shape) if self._mesh else (self._world.size,)
        self._kept: dict[str, Kept] = {}
        self._twice: list[str] = []

    def begin(self, batch: str | None, batch_axis: str) -> None:
        """Keeps the parameters, and has the module tell what it does.

        Raises:
            Misuse: see `capture`.
        """
        self._check()
        self._axes = tuple(self._mesh.mesh_dim_names or ()) if self._mesh else ()
        require(
            not batch_axis or batch_axis in self._axes,
            f"batch_axis must be one of axes {', '.join(self._axes) or 'none'}, got {batch_axis!r}",
        )
        place = self._axes.index(batch_axis) if batch_axis else 0
        divides = is_data_parallel(self._module, self._mesh_shape[place])
        self._batch = batch or (MEAN_OF_PARTS if divides else WHOLE)
        self._batch_axis = batch_axis
        known = [each for each in BATCHES if each != PARTS_OF_WHOLE]
        require(self._batch in known, f"batch must be one of {', '.join(known)} or None, got {batch!r}")
        self._run = self._world.from_first(secrets.token_hex(16))
        for name in self._shapes:
            self._keep_parameter("param.", name)
        for name, buffer in self._module.named_buffers():
            self._keep(f"before.{own_name(name)}", buffer)
        self._autocast = ""
        self._whole = WholeMet(self._module, self._named_inputs, self._outputs, self._keep)
        self._parts = PartsMet(self._module, self._boundaries, self._keep)

    def end(self) -> None:
        """Has the module run as before."""
        self._whole.remove()
        self._parts.remove()

    def write(self) -> None:
        """Writes this rank's two files, the manifest last.

        Raises:
            Misuse: there is not one forward and backward, or a rank would write more than the limit.
        """
        calls = self._whole.num_calls
        require(calls == 1, f"capture is of one forward, the module was called {calls} times within the block")
        require(
            not self._twice,
            f"capture is of one backward, {''.join(self._twice[:1])} was met by a second one: call backward once",
        )
        for name in self._shapes:
            self._keep_parameter("grad.", name)
        for name, buffer in self._module.named_buffers():
            before = self._kept.get(f"before.{own_name(name)}")
            if before is None or not same_bits(before.local, waited(_local(buffer))):
                self._keep(f"buffer.{own_name(name)}", buffer)
        self._tell_size()
        self._folder.mkdir(parents=True, exist_ok=True)
        path, tensors = paths_of(self._folder, self._world.rank)
        files = {name: kept.local for name, kept in self._kept.items()}
        files |= {INDICES + name: kept.indices for name, kept in self._kept.items() if kept.indices is not None}
        size_bytes = write_tensors(tensors, files)
        write_whole(path, msgspec.json.format(msgspec.json.encode(self._manifest(size_bytes)), indent=1))

    def _manifest(self, size_bytes: int) -> Manifest:
        return Manifest(
            run=self._run,
            rank=self._world.rank,
            world_size=self._world.size,
            mesh=self._mesh_shape,
            axes=self._axes,
            batch=self._batch,
            batch_axis=self._batch_axis,
            inputs=self._whole.inputs,
            positional=self._whole.positional,
            outputs=self._outputs,
            boundaries=self._boundaries,
            parameters={name: self._told(name) for name in self._shapes},
            autocast=self._autocast,
            tensors={name: _told_of(kept) for name, kept in self._kept.items()},
            size_bytes=size_bytes,
            torch=str(torch.__version__),
            equivtest=__version__,
        )

    def _check(self) -> None:
        """Raises Misuse where this would be no run of its own."""
        path, tensors = paths_of(self._folder, self._world.rank)
        taken = next((each for each in (path, tensors) if each.exists() or each.is_symlink()), None)
        require(taken is None, f"{taken} is there already: capture into an empty folder, or remove that run first")
        ranks = None if self._mesh is None else self._mesh.mesh.flatten().tolist()
        require(
            ranks is None or ranks == list(range(self._world.size)),
            f"mesh must have all {self._world.size} ranks of the job in order, got {ranks}: capture(mesh=) says it",
        )
        left = [
            name for name, each in self._parameters.items() if each.grad is not None and bool(_local(each.grad).any())
        ]
        require(
            not left,
            f"parameter {''.join(left[:1])} has a gradient from before: call zero_grad() before the block begins",
        )

    def _tell_size(self) -> None:
        sizes = self._world.all_of(self.size_bytes)
        largest = sizes.index(max(sizes))
        require(
            max(sizes) <= self._limit_bytes,
            f"rank {largest} would write {_in_words(max(sizes))}, at most {_in_words(self._limit_bytes)} are written: "
            "name fewer parts, capture(boundaries=['layers.0.*']), or say limit_bytes=",
        )
        if self._world.rank == 0:
            sys.stderr.write(
                f"equivtest: {len(sizes)} ranks write {_in_words(sum(sizes))}, one at most {_in_words(max(sizes))}, "
                f"into {self._folder}\n"
            )

    def _named_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
        device = next((each.device.type for each in self._parameters.values()), "cpu")
        if torch.is_autocast_enabled(device):
            self._autocast = dtype_name(torch.get_autocast_dtype(device))
        return named_inputs(self._module, args, kwargs)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        """Copies what this rank has of a tensor; once the limit is passed sizes are counted alone."""
        if name in self._kept:
            self._twice.append(name)
            return
        layout, order = self._layout_of(name, tensor)
        whole = tuple(tensor.shape) if isinstance(tensor, DTensor) and layout else None
        self._add(name, _local(tensor.detach()), Kept(tensor, layout, order, whole, tensor.requires_grad))

    def _add(self, name: str, local: torch.Tensor, kept: Kept) -> None:
        require(
            local.dtype in NAMES,
            f"{name} is of {dtype_name(local.dtype)}, which a captured run does not hold: leave it out",
        )
        self.size_bytes += local.nbytes + (0 if kept.indices is None else kept.indices.nbytes)
        fits = self.size_bytes <= self._limit_bytes
        self._kept[name] = kept._replace(local=waited(local) if fits else torch.empty(0, dtype=local.dtype))

    def _keep_parameter(self, what: str, name: str) -> None:
        """The parameter, or its gradient where it has one."""
        said = self._placed(self._module, name) if self._placed else None
        if said is None and name not in self._parameters:
            raise Misuse(
                f"the module has no parameter {name}, only {', '.join(self._parameters)}: capture(placed=) says it"
            )
        tensor, indices = (self._parameters[name], None) if said is None else said
        held = tensor if what == "param." else tensor.grad
        if held is None:
            return
        if indices is None:
            self._keep(f"{what}{name}", held)
            return
        local, indices = _local(held.detach()), indices.cpu()
        require(
            indices.dtype == torch.int64 and indices.shape == local.shape,
            f"placed, of parameter {name}, must give int64 indices of shape {tuple(local.shape)}, -1 where an element "
            f"is none of it, got {dtype_name(indices.dtype)} of shape {tuple(indices.shape)}",
        )
        is_held = indices >= 0
        kept = Kept(local, requires_grad=tensor.requires_grad, indices=indices[is_held])
        self._add(f"{what}{name}", waited(local)[is_held], kept)

    def _told(self, name: str) -> Parameter:
        held = self._kept[f"param.{name}"]
        return Parameter(tuple(self._shapes[name]), dtype_name(held.local.dtype), held.requires_grad)

    def _layout_of(self, name: str, tensor: torch.Tensor) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The placement on each axis of the mesh, '' on those of which the tensor says nothing; () of a plain one."""
        if not isinstance(tensor, DTensor):
            return (), ()
        axes = self._axes_of(tensor.device_mesh)
        if axes is None:
            require(
                name.partition(".")[0] not in ("param", "given"),
                f"{name} is a DTensor on a mesh of {tuple(tensor.device_mesh.shape)} that is no part of the job's, of "
                f"{self._mesh_shape}: capture(mesh=) says the mesh of all ranks",
            )
            return (), ()
        layout = layout_of(tensor, name)
        texts = dict(zip(axes, map(str, layout.placements), strict=True))
        return tuple(texts.get(axis, "") for axis in range(len(self._mesh_shape))), tuple(
            axes[axis] for axis in layout.shard_order
        )

    def _axes_of(self, mesh: DeviceMesh) -> tuple[int, ...] | None:
        """Which axes of the job's mesh another mesh has; None where it has other ones."""
        if self._mesh is None:
            return (0,) if mesh.mesh.tolist() == list(range(self._world.size)) else None
        if mesh.ndim == self._mesh.ndim:
            return tuple(range(mesh.ndim)) if torch.equal(mesh.mesh, self._mesh.mesh) else None
        names = mesh.mesh_dim_names or ()
        return tuple(map(self._axes.index, names)) if names and set(names) <= set(self._axes) else None


def _widest_mesh(tensors: Any) -> DeviceMesh | None:
    meshes = [each.device_mesh for each in tensors if isinstance(each, DTensor)]
    return max(meshes, key=lambda mesh: (mesh.size(), mesh.ndim), default=None)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _told_of(kept: Kept) -> Tensor:
    return Tensor(
        sha256=digest_of(kept.local),
        layout=kept.layout,
        order=kept.order,
        whole=kept.whole,
        requires_grad=kept.requires_grad,
        is_listed=kept.indices is not None,
    )


def _in_words(num_bytes: int) -> str:
    """'1.5 MiB'."""
    exponent = min(4, max(0, int(math.log2(max(1, num_bytes)) // 10)))
    return f"{num_bytes / 1024**exponent:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[exponent]}"
