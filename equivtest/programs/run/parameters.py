"""Finds a rank's part of each parameter of the unsharded module, and of its gradient, by name or by element.

A DTensor declares its part of the whole tensor. A tensor that `parallelize` did not replace is the whole parameter. For
all other tensors, the module `tracing` finds the elements, or your function `placed` returns them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from equivtest.base.importing import closest, load_named, require_arguments
from equivtest.cases.case import Shape
from equivtest.cases.subject import Answers
from equivtest.errors import Misuse
from equivtest.layout import UNTOLD
from equivtest.programs.case import ModuleCase
from equivtest.programs.names import by_own_name, own_names
from equivtest.programs.run.tracing import NONE, WAY_OUT, Place, Places, read_places
from equivtest.tensors import DTYPES, Placed

Parallelize = Callable[[Mapping[str, torch.Tensor]], nn.Module]
"""(whole parameters by name) -> the parallel module."""

_read: dict[tuple[object, ...], Places] = {}
"""(build, parallelize, dtype, mesh) -> places that `places_in` found on this rank."""


def places_in(
    case: ModuleCase, mesh: DeviceMesh, parallel: nn.Module, handed: Mapping[str, nn.Parameter], make: Parallelize
) -> Places | None:
    """Finds which elements of each parameter this rank has.

    The result is None if each parameter is whole or a DTensor of the mesh.

    The search for elements calls `parallelize`, which may communicate. So either all ranks search or no rank does. All
    ranks decide alike, because the decision depends on the way in which the module is made, and not on values.

    Args:
        handed: The parameters of the unsharded module that was passed to `parallelize`.

    Raises:
        Misuse: the elements cannot be found.
    """
    if case.judge.placed or _is_by_name(case, mesh, parallel, handed):
        return None
    key = (case.build, case.parallelize, case.dtype, mesh)
    if key not in _read:
        shapes = {name: fact.shape for name, fact in case.facts.parameters.items()}

        def make_locals(whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            filled = {name: tensor.to(mesh.device_type, DTYPES[case.dtype]) for name, tensor in whole.items()}
            made = make(filled)
            own_name, named = own_names(made), made.named_parameters()
            return {name: _local(each) for name, each in named if not _is_placed(case, mesh, own_name(name), each)}

        _read[key] = read_places(shapes, make_locals, case.parallelize)
    return _read[key]


def _is_by_name(case: ModuleCase, mesh: DeviceMesh, parallel: nn.Module, handed: Mapping[str, nn.Parameter]) -> bool:
    """True if every parameter keeps its name, and is a DTensor on the mesh or the whole original parameter.

    FullyShardedDataParallel keeps the parameters and makes them views of other storage.
    """
    if any(isinstance(part, FullyShardedDataParallel) for part in parallel.modules()):
        return False
    parameters = by_own_name(parallel, parallel.named_parameters())
    return all(
        name in parameters
        and (
            (parameters[name] is handed[name] and tuple(parameters[name].shape) == fact.shape)
            or _is_placed(case, mesh, name, parameters[name])
        )
        for name, fact in case.facts.parameters.items()
    )


def _is_placed(case: ModuleCase, mesh: DeviceMesh, name: str, tensor: torch.Tensor) -> bool:
    """True if a parameter is a DTensor on the mesh, and the DTensor's placements show this rank's part.

    The result is False for a strided shard on a mesh of one axis. Such a shard comes from a merged projection whose
    parts were divided separately. The module `tracing` finds the elements of the shard.
    """
    fact = case.facts.parameters.get(name)
    return (
        isinstance(tensor, DTensor)
        and fact is not None
        and tuple(tensor.shape) == fact.shape
        and (tensor.device_mesh is mesh or torch.equal(tensor.device_mesh.mesh, mesh.mesh))
        and (mesh.ndim > 1 or not any(type(each).__name__ == "_StridedShard" for each in tensor.placements))
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Part(NamedTuple):
    """Some elements of a parameter and of its gradient.

    The elements are 1-D, or have the shape of the tensor that contains them.

    Attributes:
        indices: Index of each element in the flattened whole parameter.
    """

    value: torch.Tensor
    gradient: torch.Tensor | None
    indices: torch.Tensor


def held_parameters(case: ModuleCase, mesh: DeviceMesh, parallel: nn.Module, places: Places | None) -> Answers:
    """Returns this rank's part of every parameter and its gradient.

    Raises:
        Misuse: a tensor's shape has changed since the module was made, or a gradient has another shape than its
            parameter.
    """
    tensors = dict(parallel.named_parameters())
    named = by_own_name(parallel, tensors.items())
    answers: Answers = {}
    for name in case.parameter_names():
        if case.judge.placed:
            parts = _told(case, parallel, name)
        elif places is None or (name in named and _is_placed(case, mesh, name, named[name])):
            parts = None
        else:
            parts = [_part(case, place, tensors) for place in places[name]]
        if parts is None:
            answers |= _by_name(case, name, named)
        else:
            answers |= _by_elements(case, name, parts)
    return answers


def _by_name(case: ModuleCase, name: str, found: Mapping[str, nn.Parameter]) -> Answers:
    if name not in found:
        near = closest(name, found, likeness=0)
        others = f"; the most similar of its {len(found)} names is {near}" if near else ", nor any other"
        raise Misuse(f"{case.parallelize}: the parallel module has no parameter {name}{others}: {WAY_OUT}")
    tensor = found[name]
    require_whole(case, f"parameter {name}", tensor, case.shapes()[name])
    require_whole(case, f"gradient of {name}", tensor.grad, case.shapes()[name])
    layout = case.layouts()[f"param.{name}"]
    return {
        answer: each if each is None or isinstance(each, DTensor) else Placed(each, layout)
        for answer, each in ((f"param.{name}", tensor), (f"grad.{name}", tensor.grad))
    }


def _by_elements(case: ModuleCase, name: str, parts: list[Part]) -> Answers:
    requires_grad = case.facts.parameters[name].requires_grad
    if not parts:
        none = torch.empty(0, dtype=DTYPES[case.dtype])
        parts = [Part(none.requires_grad_(requires_grad), none.detach(), torch.empty(0, dtype=torch.int64))]
    if len(parts) > 1:
        parts = [Part(each.value.flatten(), _flat(each.gradient), each.indices.flatten()) for each in parts]
    if len(dtypes := {each.value.dtype for each in parts}) > 1:
        raise Misuse(
            f"{case.parallelize}: parameter {name} has parts in {' and '.join(sorted(map(str, dtypes)))}: use one dtype"
        )
    indices, value = _joined([each.indices for each in parts]), _joined([each.value for each in parts])
    gradient = None
    if any(each.gradient is not None for each in parts):  # if a part has no gradient, none reached it
        gradient = _joined([torch.zeros_like(each.value) if each.gradient is None else each.gradient for each in parts])
    return {
        f"param.{name}": Placed(value, UNTOLD, indices=indices),
        f"grad.{name}": None if gradient is None else Placed(gradient, UNTOLD, indices=indices),
    }


def _flat(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.flatten()


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _part(case: ModuleCase, place: Place, tensors: Mapping[str, torch.Tensor]) -> Part:
    """Returns the elements that one tensor of the parallel module has of a parameter after the run."""
    holder = tensors.get(place.holder)
    shape = None if holder is None else tuple(_local(holder).shape)
    if holder is None or shape != tuple(place.indices.shape):
        raise Misuse(
            f"{case.parallelize}: parameter {place.holder} was of shape {tuple(place.indices.shape)} when it was made, "
            f"and is {'gone' if shape is None else f'of shape {shape}'} after a forward and backward: {WAY_OUT}"
        )
    return _elements(case, place.holder, holder, place.indices)


def _elements(case: ModuleCase, name: str, tensor: torch.Tensor, indices: torch.Tensor) -> Part:
    """Selects the elements that have an index. If all elements have an index, the tensor's shape is kept."""
    gradient = tensor.grad
    if isinstance(gradient, DTensor) and isinstance(tensor, DTensor) and gradient.placements != tensor.placements:
        raise Misuse(
            f"{case.parallelize}: parameter {name} has placements {tensor.placements}, but its gradient has "
            f"{gradient.placements}: redistribute the gradient"
        )
    local = _local(tensor)
    gradient = None if gradient is None else _local(gradient)
    if gradient is not None and gradient.shape != local.shape:
        raise Misuse(
            f"{case.parallelize}: parameter {name} has local shape {tuple(local.shape)}, but its gradient "
            f"{tuple(gradient.shape)}: both must have the same shape"
        )
    is_held = indices != NONE
    if bool(is_held.all()):
        return Part(local, gradient, indices)
    value = local.detach()[is_held].requires_grad_(tensor.requires_grad)
    return Part(value, None if gradient is None else gradient[is_held], indices[is_held])


def _told(case: ModuleCase, parallel: nn.Module, name: str) -> list[Part] | None:
    """Returns this rank's parts of a parameter as your function `placed` returns them, or None for its None.

    Raises:
        Misuse: the function returns neither None nor a tensor with the indices of its elements.
    """
    function = cast("Callable[[nn.Module, str], Any]", load_named(case.judge.placed, "placed"))
    require_arguments(function, f"placed {case.judge.placed!r}", ("module", "name"))
    report = function(parallel, name)
    if report is None:
        return None
    is_pair = isinstance(report, tuple) and len(report) == 2 and all(isinstance(each, torch.Tensor) for each in report)
    what = f"{case.judge.placed}, for parameter {name}, must return None or a tensor and its indices"
    if not is_pair:
        raise Misuse(f"{what}, got {type(report).__name__}")
    tensor, indices = report
    if indices.dtype != torch.int64 or indices.shape != _local(tensor).shape:
        raise Misuse(
            f"{what}; the indices must be int64 of the tensor's shape {tuple(_local(tensor).shape)}, with -1 for an "
            f"element that is not of {name}, got {indices.dtype} of shape {tuple(indices.shape)}"
        )
    return [_elements(case, name, tensor, indices.cpu())]


def require_whole(case: ModuleCase, what: str, tensor: torch.Tensor | None, shape: Shape) -> None:
    """Raises Misuse for a plain tensor with another shape, because nothing shows which part of the whole it is."""
    if tensor is None or isinstance(tensor, DTensor) or tensor.shape == shape:
        return
    raise Misuse(
        f"{case.parallelize}: {what} is a plain tensor of shape {tuple(tensor.shape)}, but in the unsharded module it "
        f"has {shape}: make the shard a DTensor by DTensor.from_local, which records its place, or {WAY_OUT}"
    )
