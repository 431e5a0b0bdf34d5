"""Copies the tensors of a module's forwards and backwards on one rank, and writes them to the rank's files."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from equivtest import __version__
from equivtest.base.files import write_whole
from equivtest.captured.format.folder import INDICES, paths_of
from equivtest.captured.format.manifest import Manifest, Parameter, ParameterGroup
from equivtest.captured.format.tensor_file import NAMES, write_tensors
from equivtest.captured.write.job import Job, Kept, entry_of, local_of
from equivtest.cases.case import require
from equivtest.errors import Misuse
from equivtest.programs.boundaries import is_in_backward
from equivtest.programs.micro_batches import at_micro_batch, split_micro_batch
from equivtest.programs.names import by_own_name, own_names
from equivtest.programs.run.recording import PartsMet, WholeMet, named_inputs, unwrapped
from equivtest.ranks.layouts import layout_of
from equivtest.ranks.meshes import rank_in
from equivtest.ranks.visit import waited
from equivtest.tensors import dtype_name, same_bits, slice_local


class Keeper:
    """Copies the tensors of the job's module, or of one of its submodules, on this rank.

    Args:
        path: Name of the submodule in the unsharded module. It is '' for the whole module.
        folder: Folder for the two files of this rank.
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
        self._own_name = own_names(module)
        self._parameters = by_own_name(module, module.named_parameters())
        self._shapes = {
            name.removeprefix(self._prefix): tuple(shape)
            for name, shape in job.shapes.items()
            if name.startswith(self._prefix)
        }
        self._autocasts: set[str] = set()
        self._kept: dict[str, Kept] = {}
        self._twice: list[str] = []
        self._touched: list[str] = []
        self._hooks = ExitStack()
        self._inputs: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # all names, and the positional ones
        self._micro_batches = 1
        self._optimizer: tuple[str, tuple[ParameterGroup, ...]] = ("", ())

    def begin(self) -> None:
        """Copies parameters and buffers, and registers the hooks that copy inputs, outputs and boundaries.

        Raises:
            Misuse: the folder has another run, or parameters still have gradients from before.
        """
        self._check()
        for name in self._shapes:
            self._keep_parameter("param.", name)
        self._whole = WholeMet(self._module, self._named_inputs, self._outputs, self._keep, self._look_again)
        self._hooks.callback(self._whole.remove)
        self._hooks.callback(unwrapped(self._module).register_forward_pre_hook(self._keep_buffers_before).remove)
        self._parts = PartsMet(self._module, self._boundaries, self._keep, self._whole)
        self._hooks.enter_context(self._parts)

    def end(self) -> None:
        self._hooks.close()

    def finish(self) -> None:
        """Copies gradients, and buffers that the forward changed.

        Raises:
            Misuse: there was no forward, or some forward did not have exactly one backward.
        """
        calls, what = self._whole.num_calls, self._path or "the module"
        require(calls > 0, f"{what} was called 0 times within the block: run its forward and backward within it")
        require(
            not self._twice,
            f"capture allows one backward per forward; a second backward reached {''.join(self._twice[:1])}: call "
            "backward once",
        )
        self._micro_batches, self._inputs = calls, self._whole.inputs[0]
        for number, inputs in enumerate(self._whole.inputs, 1):
            require(
                inputs == self._inputs,
                f"within the block {what} took the inputs {', '.join(inputs[0])} in call {number}, but "
                f"{', '.join(self._inputs[0])} in call 1: pass the same inputs each time, in the same way",
            )
        autocasts = [each or "none" for each in sorted(self._autocasts)]
        require(
            len(autocasts) == 1,
            f"{what} was called under autocast {' and '.join(autocasts)} within the block: use only one of them",
        )
        finished = {number for number, name in map(split_micro_batch, self._kept) if name.startswith("cotangent")}
        open_ = [number for number in range(1, calls + 1) if number not in finished]
        require(
            not open_,
            f"no gradient reached the outputs of call {''.join(map(str, open_[:1]))} of {calls} of {what} within the "
            "block: call backward for each forward there, and run a forward without backward outside of the block",
        )
        for name in self._shapes:
            self._keep_parameter("grad.", name)
            if self._shard_of(name)[1] is None:
                self._look_again(f"param.{name}", self._shard_of(name)[0])
        self._keep_buffers_left(calls)

    def write(self) -> None:
        """Writes this rank's two files: first the tensors, then the manifest."""
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
            micro_batches=self._micro_batches,
            parameters={name: self._parameter(name) for name in self._shapes},
            autocast="".join(self._autocasts),
            tensors={name: entry_of(kept) for name, kept in self._kept.items()},
            size_bytes=size_bytes,
            optimizer=self._optimizer[0],
            groups=self._optimizer[1],
            touched=tuple(self._touched),
            torch=str(torch.__version__),
            equivtest=__version__,
        )

    def _require_empty(self) -> None:
        path, tensors = paths_of(self._folder, self._job.world.rank)
        taken = next((each for each in (path, tensors) if each.exists() or each.is_symlink()), None)
        require(taken is None, f"{taken} exists already: capture into an empty folder, or remove that run first")

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
        ids, unsharded_name = {id(each) for each in self._parameters.values()}, own_names(self._job.module)
        parameters = self._job.module.named_parameters(remove_duplicate=False)
        names = [unsharded_name(name) for name, each in parameters if id(each) in ids]
        tied = [name for name in names if not name.startswith(self._prefix)]
        require(
            not tied,
            f"submodule {self._path} shares parameter {''.join(tied[:1])} with another one, so its gradient is the sum "
            "of both uses: name a submodule that contains both in alone=, or leave this one out",
        )

    def _named_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
        if (number := self._whole.num_calls) > 1:
            self._keep_buffers_left(number - 1)
            self._parts.begin_again()
        device = next((each.device.type for each in self._parameters.values()), "cpu")
        is_on = torch.is_autocast_enabled(device)
        self._autocasts.add(f"{device}:{dtype_name(torch.get_autocast_dtype(device))}" if is_on else "")
        return named_inputs(self._module, args, kwargs)

    def _keep_buffers_before(self, *_: object) -> None:
        """Copies the buffers when a forward begins, after wrappers have broadcast the buffers."""
        if is_in_backward():
            return
        for name, buffer in self._module.named_buffers():
            if (what := self._whole.at(f"before.{self._own_name(name)}")) not in self._kept:
                self._keep(what, buffer)

    def _keep_buffers_left(self, number: int) -> None:
        for name, buffer in self._module.named_buffers():
            before = self._kept.get(at_micro_batch(number, f"before.{self._own_name(name)}"))
            if before is None or not same_bits(before.local, waited(local_of(buffer))):
                self._keep(at_micro_batch(number, f"buffer.{self._own_name(name)}"), buffer)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        """Copies this rank's shard of a tensor under `name`.  Beyond the limit of bytes, only the size is added up."""
        if name in self._kept:
            self._twice.append(name)
            return
        layout, order = self._layout_of(name, tensor)
        whole = tuple(tensor.shape) if isinstance(tensor, DTensor) and layout else None
        self._add(name, local_of(tensor.detach()), Kept(tensor, layout, order, whole, tensor.requires_grad))

    def _add(self, name: str, local: torch.Tensor, kept: Kept) -> None:
        require(
            local.dtype in NAMES,
            f"tensor {name} has dtype {dtype_name(local.dtype)}, which a captured run cannot hold: leave it out",
        )
        self._job.size_bytes += local.nbytes + (0 if kept.indices is None else kept.indices.nbytes)
        fits = self._job.size_bytes <= self._job.limit_bytes
        self._kept[name] = kept._replace(local=waited(local) if fits else torch.empty(0, dtype=local.dtype))

    def _look_again(self, name: str, tensor: torch.Tensor) -> None:
        """Records the name of an input of the module whose values have changed since its copy."""
        fits = self._job.size_bytes <= self._job.limit_bytes
        if fits and not same_bits(self._kept[name].local, waited(local_of(tensor.detach()))):
            self._touched.append(name)

    def _keep_parameter(self, what: str, name: str) -> None:
        """Copies this rank's shard of a parameter (`what` is 'param.') or of its gradient, if there is one."""
        tensor = self._shard_of(name)[0]
        kept = tensor if what == "param." else tensor.grad
        if kept is not None:
            self._keep_like(name, f"{what}{name}", kept)

    def _shard_of(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns this rank's shard of a parameter, and its elements' positions unless the layout determines them."""
        placed = self._job.placed
        shard = placed(self._job.module, self._prefix + name) if placed else None
        if shard is None and name not in self._parameters:
            raise Misuse(
                f"shapes= names parameter {name}, but the module has only {', '.join(self._parameters)}: say where the "
                "ranks have its elements, capture(placed=)"
            )
        return (self._parameters[name], self._places_on_other_mesh(name)) if shard is None else shard

    def _places_on_other_mesh(self, name: str) -> torch.Tensor | None:
        """Returns the positions of a DTensor's elements in the flattened whole tensor, or None.

        Only a DTensor whose mesh has an axis that the job's mesh lacks, such as a flattened axis, needs positions.
        """
        tensor = self._parameters[name]
        if not isinstance(tensor, DTensor) or self._axes_of(tensor.device_mesh) is not None:
            return None
        whole = torch.arange(tensor.numel()).reshape(tensor.shape)
        mesh = tensor.device_mesh
        return slice_local(whole, layout_of(tensor, name), tuple(mesh.shape), rank_in(mesh))

    def _keep_like(self, name: str, what: str, other: torch.Tensor) -> None:
        """Copies a tensor that is sharded like parameter `name`, such as its gradient, under the name `what`."""
        tensor, indices = self._shard_of(name)
        if indices is None:
            self._keep(what, other)
            return
        if isinstance(other, DTensor) and isinstance(tensor, DTensor):
            require(
                other.placements == tensor.placements,
                f"parameter {name} has placements {tensor.placements}, but {what} has {other.placements}: "
                f"redistribute {what}",
            )
        local, indices = local_of(other.detach()), indices.cpu()
        require(
            indices.dtype == torch.int64 and indices.shape == local.shape,
            f"placed must return int64 indices of shape {tuple(local.shape)} for parameter {name}, -1 for padding, "
            f"got {dtype_name(indices.dtype)} of shape {tuple(indices.shape)}",
        )
        is_element = indices >= 0
        kept = Kept(local, requires_grad=tensor.requires_grad, indices=indices[is_element])
        self._add(what, waited(local)[is_element], kept)

    def _parameter(self, name: str) -> Parameter:
        kept = self._kept[f"param.{name}"]
        return Parameter(tuple(self._shapes[name]), dtype_name(kept.local.dtype), kept.requires_grad)

    def _layout_of(self, name: str, tensor: torch.Tensor) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Returns a DTensor's placement on each axis of the job's mesh, and the order of the sharded axes.

        An unknown placement is ''.  For a plain tensor both tuples are ().
        """
        if not isinstance(tensor, DTensor):
            return (), ()
        axes = self._axes_of(tensor.device_mesh)
        if axes is None:
            require(
                split_micro_batch(name)[1].partition(".")[0] not in ("param", "given"),
                f"{name} is a DTensor on a mesh of {tuple(tensor.device_mesh.shape)}, which is not in the job's mesh "
                f"of {self._job.mesh_shape}: pass the mesh of all ranks, capture(mesh=)",
            )
            return (), ()
        layout = layout_of(tensor, name)
        texts = dict(zip(axes, map(str, layout.placements), strict=True))
        return tuple(texts.get(axis, "") for axis in range(len(self._job.mesh_shape))), tuple(
            axes[axis] for axis in layout.shard_order
        )

    def _axes_of(self, mesh: DeviceMesh) -> tuple[int, ...] | None:
        """Returns the numbers of `mesh`'s axes in the job's mesh, or None if the job's mesh lacks one of them."""
        if self._job.mesh is None:
            return (0,) if mesh.mesh.tolist() == list(range(self._job.world.size)) else None
        if mesh.ndim == self._job.mesh.ndim:
            return tuple(range(mesh.ndim)) if torch.equal(mesh.mesh, self._job.mesh.mesh) else None
        names = mesh.mesh_dim_names or ()
        return tuple(map(self._job.axes.index, names)) if names and set(names) <= set(self._job.axes) else None
