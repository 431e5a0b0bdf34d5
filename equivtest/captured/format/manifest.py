"""Defines the manifest that each rank writes beside its tensors.  It has a version, and is checked when it is read."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from equivtest.base import limits
from equivtest.captured.format.tensor_file import open_plainly
from equivtest.errors import Misuse

KIND, VERSION = "equivtest capture", 3
"""Name and version of the manifest's form.  A change that an older reader would misread raises the version."""

Shape = tuple[int, ...]


class Parameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    shape: Shape
    dtype: str
    requires_grad: bool


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes one tensor of the rank.

    Attributes:
        sha256: Digest of the tensor's bytes in the file of tensors. That file also has the tensor's shape and dtype.
        layout: The tensor's placement on each axis of the mesh. An unknown placement is ''. The tuple is empty if the
            tensor is no DTensor.
        order: The axes in the order of sharding, as in `equivtest.layout.Layout`.
        whole: Global shape of the tensor. None if the shape is unknown.
        is_listed: True if the file has a tensor 'indices.NAME' with the position of each element in the flattened whole
            tensor.
    """

    sha256: str
    layout: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    whole: Shape | None = None
    requires_grad: bool = False
    is_listed: bool = False


class ParameterGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    parameters: tuple[str, ...]
    options: dict[str, bool | int | float | tuple[float, ...] | None]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The description that one rank writes of a captured run.

    Attributes:
        run: Hexadecimal digits that identify the run.
        mesh, axes: Number of ranks along each axis of the mesh, and the axes' names, if they have names.
        batch, batch_axis: How the batch is divided ('whole', 'mean of parts' or 'sum of parts'), and the name of the
            mesh axis along which the batch is divided. If the name is '', this is the first axis.
        part: Name of the submodule that was captured alone. It is '' if the whole model was captured.
        inputs: Names of the inputs, in the order of the model's parameters.
        positional: Names of the inputs that were passed by position.
        outputs: Names of the captured outputs. If empty, all outputs were captured.
        boundaries: Patterns of the names of the captured submodules.
        micro_batches: Number of calls of the model. Each call has its own inputs and its own backward. Gradients of
            parameters are sums over all calls.
        parameters: The parameters of the unsharded model, by name.
        autocast: Device and dtype of autocast around the forward, such as 'cpu:bfloat16', or ''.
        tensors: Descriptions of the tensors in the file of tensors, by name. The tensor 'given.ids' is an input.
            'cotangent.loss' is the gradient that came to an output from outside of the model. 'before.NAME' is a buffer
            before the forward. 'micro2.given.ids' is an input of the second micro-batch.
        size_bytes: Size of the file of tensors.
        optimizer: Name of the optimizer's class in torch.optim if an update was captured, or ''.
    """

    kind: str = KIND
    version: int = VERSION
    run: str
    rank: int
    world_size: int
    mesh: Shape
    axes: tuple[str, ...]
    batch: str
    batch_axis: str
    part: str
    inputs: tuple[str, ...]
    positional: tuple[str, ...]
    outputs: tuple[str, ...]
    boundaries: tuple[str, ...]
    parameters: dict[str, Parameter]
    autocast: str
    tensors: dict[str, Tensor]
    size_bytes: int
    optimizer: str
    groups: tuple[ParameterGroup, ...]
    torch: str
    equivtest: str
    micro_batches: int = 1
    touched: tuple[str, ...] = ()


SHARED = (
    "world_size", "mesh", "axes", "batch", "batch_axis", "part", "inputs", "positional", "outputs", "boundaries",
    "parameters", "autocast", "optimizer", "groups", "micro_batches",
)  # fmt: skip


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of one rank.  Raises Misuse if it is unreadable, invalid or of another version."""
    with open_plainly(path) as file:
        data = file.read(limits.MANIFEST_BYTES + 1)
    if len(data) > limits.MANIFEST_BYTES:
        raise Misuse(f"manifest {path} has more than {limits.MANIFEST_BYTES} bytes, the limit for a manifest")
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        kind, version = (msgspec.json.decode(fields[key]) for key in ("kind", "version"))
    except (msgspec.DecodeError, KeyError, RecursionError, UnicodeDecodeError) as error:
        raise Misuse(f"manifest {path} is cut off, or is not the manifest of a captured run: {error}") from error
    if kind != KIND or version != VERSION:
        raise Misuse(
            f"manifest {path} is a {str(kind)[:40]!r} of version {str(version)[:9]}, but this equivtest reads {KIND!r} "
            f"of version {VERSION}: judge the run with the version of equivtest that wrote it"
        )
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Misuse(f"manifest {path} is broken: {error}") from error
    _check(path, manifest)
    return manifest


def _check(path: Path, manifest: Manifest) -> None:
    """Raises Misuse if a name has control characters or is too long, or if a size or a number is impossible."""
    texts = (
        manifest.axes, manifest.inputs, manifest.positional, manifest.outputs, manifest.boundaries, manifest.parameters,
        manifest.tensors, (manifest.batch, manifest.batch_axis, manifest.part, manifest.autocast, manifest.optimizer),
        *(text for group in manifest.groups for text in (group.parameters, group.options)),
    )  # fmt: skip
    for text in (text for group in texts for text in group):
        if len(text) > limits.NAME_CHARS or not text.isprintable():
            raise Misuse(
                f"manifest {path} has the name {text[:40]!r}: a name must be printable, with at most "
                f"{limits.NAME_CHARS} characters"
            )
    if not re.fullmatch(r"[0-9a-f]{32}", manifest.run):
        raise Misuse(f"manifest {path}: the field 'run' must have 32 hexadecimal digits, got {manifest.run[:40]!r}")
    sizes = [*manifest.mesh, *(size for each in manifest.parameters.values() for size in each.shape)]
    sizes += [manifest.rank, manifest.world_size, manifest.size_bytes]
    sizes += [size for each in manifest.tensors.values() for size in (*(each.whole or ()), *each.order)]
    if not all(0 <= size < limits.CAPTURED_SIZE for size in sizes) or not 1 <= len(manifest.mesh) <= 2:
        raise Misuse(
            f"manifest {path} has a size outside of 0..{limits.CAPTURED_SIZE - 1}, or a mesh of other than 1 or 2 axes"
        )
    unknown = [name for name in manifest.touched if name not in manifest.tensors]
    if unknown:
        raise Misuse(f"manifest {path} says that {unknown[0][:40]!r} was changed, but has no such tensor")
    if not 1 <= manifest.micro_batches <= max(1, len(manifest.tensors)):
        raise Misuse(f"manifest {path} names {manifest.micro_batches} micro-batches, but lacks a tensor for each")
