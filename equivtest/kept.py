"""What one rank keeps of a module, or of one part of it, in a forward and backward, and what it writes of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from equivtest import __version__
from equivtest.captured.folder import INDICES, paths_of
from equivtest.captured.group import Group
from equivtest.captured.manifest import Manifest, Parameter, ParameterGroup, Tensor
from equivtest.captured.tensor_file import NAMES, digest_of, write_tensors
from equivtest.errors import Misuse
from equivtest.families.module.case_boundaries import own_name
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


@dataclass
class Job:
    """What all that is captured in one block has in common.

    Attributes:
        module: The whole parallel module.
        run: As of `Manifest`.
        axes: Names of the mesh's axes; `mesh_shape` ranks along each.
        placed, shapes: As of `equivtest.capturing.capture`.
        size_bytes: Of what is kept so far, or would be without the limit.
    """

    module: nn.Module
    world: Group
    run: str
    mesh: DeviceMesh | None
    batch: str
    batch_axis: str
    placed: PlacedBy | None
    shapes: Mapping[str, Shape]
    limit_bytes: int
    size_bytes: int = 0

    @property
    def axes(self) -> tuple[str, ...]:
        return axes_of(self.mesh)

    @property
    def mesh_shape(self) -> Shape:
        return shape_of(self.mesh, self.world)


class Keeper:
    """Keeps what a part of the job's module holds on this rank.

    Args:
        path: Name of the part in the unsharded module, '' for all of it.
        folder: Where this rank writes two files.
    """

    def __init__(
        self,
        job: Job,
        path: str,
        module: nn.Module,
        folder: Path,
        boundaries: tuple[str, ...],
        outputs: tuple[str, ...],
    ) -> None:
        self._job, self._path, self._module, self._folder = job, path, module, folder
        self._boundaries, self._outputs = boundaries, outputs
        self._prefix = f"{path}." if path else ""
        self._parameters = {own_name(name): tensor for name, tensor in module.named_parameters()}
        self._shapes = {
            name.removeprefix(self._prefix): tuple(shape)
            for name, shape in job.shapes.items()
            if name.startswith(self._prefix)
        }
        self._autocast = ""
        self._kept: dict[str, Kept] = {}
        self._twice: list[str] = []
        self._met = ExitStack()
        self._inputs: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # and which are positional
        self._optimizer: tuple[str, tuple[ParameterGroup, ...]] = ("", ())

    def begin(self) -> None:
        """Keeps parameters and buffers, and has the module tell what it does.

        Raises:
            Misuse: there is another run in the folder, or gradients are left from before.
        """
        self._check()
        for name in self._shapes:
            self._keep_parameter("param.", name)
        for name, buffer in self._module.named_buffers():
            self._keep(f"before.{own_name(name)}", buffer)
        self._whole = WholeMet(self._module, self._named_inputs, self._outputs, self._keep)
        self._met.callback(self._whole.remove)
        self._met.enter_context(PartsMet(self._module, self._boundaries, self._keep, self._whole.is_given))

    def end(self) -> None:
        """Has the module run as before."""
        self._met.close()

    def finish(self) -> None:
        """Keeps the gradients, and the buffers that have changed.

        Raises:
            Misuse: there was not one forward and backward.
        """
        calls, what = self._whole.num_calls, self._path or "the module"
        require(calls == 1, f"capture is of one forward, {what} was called {calls} times within the block")
        require(
            not self._twice,
            f"capture is of one backward, {''.join(self._twice[:1])} was met by a second one: call backward once",
        )
        self._inputs = self._whole.inputs, self._whole.positional
        for name in self._shapes:
            self._keep_parameter("grad.", name)
        for name, buffer in self._module.named_buffers():
            before = self._kept.get(f"before.{own_name(name)}")
            if before is None or not same_bits(before.local, waited(local_of(buffer))):
                self._keep(f"buffer.{own_name(name)}", buffer)

    def write(self) -> None:
        """Writes this rank's two files, the manifest last."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path, tensors = paths_of(self._folder, self._job.world.rank)
        files = {name: kept.local for name, kept in self._kept.items()}
        files |= {INDICES + name: kept.indices for name, kept in self._kept.items() if kept.indices is not None}
        size_bytes = write_tensors(tensors, files)
        write_whole(path, msgspec.json.format(msgspec.json.encode(self._manifest(size_bytes)), indent=1))

    def _manifest(self, size_bytes: int) -> Manifest:
        return Manifest(
            run=self._job.run,
            rank=self._job.world.rank,
            world_size=self._job.world.size,
            mesh=self._job.mesh_shape,
            axes=self._job.axes,
            batch=self._job.batch,
            batch_axis=self._job.batch_axis,
            part=self._path,
            inputs=self._inputs[0],
            positional=self._inputs[1],
            outputs=self._outputs,
            boundaries=self._boundaries,
            parameters={name: self._told(name) for name in self._shapes},
            autocast=self._autocast,
            tensors={name: _told_of(kept) for name, kept in self._kept.items()},
            size_bytes=size_bytes,
            optimizer=self._optimizer[0],
            groups=self._optimizer[1],
            torch=str(torch.__version__),
            equivtest=__version__,
        )

    def _require_empty(self) -> None:
        path, tensors = paths_of(self._folder, self._job.world.rank)
        taken = next((each for each in (path, tensors) if each.exists() or each.is_symlink()), None)
        require(taken is None, f"{taken} is there already: capture into an empty folder, or remove that run first")

    def _check(self) -> None:
        self._require_empty()
        left = [
            name for name, each in self._parameters.items() if each.grad is not None and bool(local_of(each.grad).any())
        ]
        require(
            not left,
            f"parameter {self._prefix}{''.join(left[:1])} has a gradient from before: call zero_grad() before "
            "the block begins",
        )
        own = {id(each) for each in self._parameters.values()}
        everywhere = [
            (own_name(name), each) for name, each in self._job.module.named_parameters(remove_duplicate=False)
        ]
        tied = [name for name, each in everywhere if id(each) in own and not name.startswith(self._prefix)]
        require(
            not tied,
            f"{self._path} shares a parameter with {''.join(tied[:1])}, whose gradient is that of both: name a part "
            "that holds both, or leave it out of alone=",
        )

    def _named_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
        device = next((each.device.type for each in self._parameters.values()), "cpu")
        if torch.is_autocast_enabled(device):
            self._autocast = f"{device}:{dtype_name(torch.get_autocast_dtype(device))}"
        return named_inputs(self._module, args, kwargs)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        """Copies what this rank has of a tensor; once the limit is passed sizes are counted alone."""
        if name in self._kept:
            self._twice.append(name)
            return
        layout, order = self._layout_of(name, tensor)
        whole = tuple(tensor.shape) if isinstance(tensor, DTensor) and layout else None
        self._add(name, local_of(tensor.detach()), Kept(tensor, layout, order, whole, tensor.requires_grad))

    def _add(self, name: str, local: torch.Tensor, kept: Kept) -> None:
        require(
            local.dtype in NAMES,
            f"{name} is of {dtype_name(local.dtype)}, which a captured run does not hold: leave it out",
        )
        self._job.size_bytes += local.nbytes + (0 if kept.indices is None else kept.indices.nbytes)
        fits = self._job.size_bytes <= self._job.limit_bytes
        self._kept[name] = kept._replace(local=waited(local) if fits else torch.empty(0, dtype=local.dtype))

    def _keep_parameter(self, what: str, name: str) -> None:
        """The parameter, or its gradient where it has one."""
        tensor = self._said(name)[0]
        held = tensor if what == "param." else tensor.grad
        if held is not None:
            self._keep_of(name, f"{what}{name}", held)

    def _said(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tensor that a parameter is a part of, and where its elements lie in the whole; None: as it says."""
        placed = self._job.placed
        said = placed(self._job.module, self._prefix + name) if placed else None
        if said is None and name not in self._parameters:
            raise Misuse(
                f"the module has no parameter {name}, only {', '.join(self._parameters)}: capture(placed=) says it"
            )
        return (self._parameters[name], None) if said is None else said

    def _keep_of(self, name: str, what: str, held: torch.Tensor) -> None:
        """What is divided as a parameter is, by the name `what`."""
        tensor, indices = self._said(name)
        if indices is None:
            self._keep(what, held)
            return
        local, indices = local_of(held.detach()), indices.cpu()
        require(
            indices.dtype == torch.int64 and indices.shape == local.shape,
            f"placed, of parameter {name}, must give int64 indices of shape {tuple(local.shape)}, -1 where an element "
            f"is none of it, got {dtype_name(indices.dtype)} of shape {tuple(indices.shape)}",
        )
        is_held = indices >= 0
        kept = Kept(local, requires_grad=tensor.requires_grad, indices=indices[is_held])
        self._add(what, waited(local)[is_held], kept)

    def _told(self, name: str) -> Parameter:
        held = self._kept[f"param.{name}"]
        return Parameter(tuple(self._shapes[name]), dtype_name(held.local.dtype), held.requires_grad)

    def _layout_of(self, name: str, tensor: torch.Tensor) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The placement on each mesh axis, '' where the tensor says nothing; () for a plain tensor."""
        if not isinstance(tensor, DTensor):
            return (), ()
        axes = self._axes_of(tensor.device_mesh)
        if axes is None:
            require(
                name.partition(".")[0] not in ("param", "given"),
                f"{name} is a DTensor on a mesh of {tuple(tensor.device_mesh.shape)} that is no part of the job's, of "
                f"{self._job.mesh_shape}: capture(mesh=) says the mesh of all ranks",
            )
            return (), ()
        layout = layout_of(tensor, name)
        texts = dict(zip(axes, map(str, layout.placements), strict=True))
        return tuple(texts.get(axis, "") for axis in range(len(self._job.mesh_shape))), tuple(
            axes[axis] for axis in layout.shard_order
        )

    def _axes_of(self, mesh: DeviceMesh) -> tuple[int, ...] | None:
        """Which axes of the job's mesh another mesh has; None where it has other ones."""
        if self._job.mesh is None:
            return (0,) if mesh.mesh.tolist() == list(range(self._job.world.size)) else None
        if mesh.ndim == self._job.mesh.ndim:
            return tuple(range(mesh.ndim)) if torch.equal(mesh.mesh, self._job.mesh.mesh) else None
        names = mesh.mesh_dim_names or ()
        return tuple(map(self._job.axes.index, names)) if names and set(names) <= set(self._job.axes) else None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def axes_of(mesh: DeviceMesh | None) -> tuple[str, ...]:
    """Names of its axes; none where they have none."""
    return tuple(mesh.mesh_dim_names or ()) if mesh else ()


def shape_of(mesh: DeviceMesh | None, world: Group) -> Shape:
    """Ranks along each axis; all along one where there is no mesh."""
    return tuple(mesh.shape) if mesh else (world.size,)


def _told_of(kept: Kept) -> Tensor:
    return Tensor(
        sha256=digest_of(kept.local),
        layout=kept.layout,
        order=kept.order,
        whole=kept.whole,
        requires_grad=kept.requires_grad,
        is_listed=kept.indices is not None,
    )
