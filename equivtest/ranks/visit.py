"""Runs one case in a rank.

The module creates the rank's local tensors, runs the subject, and collects the returned tensors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import chdir, nullcontext
from dataclasses import replace

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from equivtest.cases.case import Case
from equivtest.cases.names import Subject, require_fit, resolve
from equivtest.cases.values import draw
from equivtest.errors import Misuse
from equivtest.ranks.backend import Backend
from equivtest.ranks.layouts import layout_of
from equivtest.ranks.meshes import mesh_for, rank_in
from equivtest.ranks.observe import faults
from equivtest.ranks.observe.recording import Recorder, is_recordable
from equivtest.ranks.poison import poisoned
from equivtest.ranks.reply import Answer
from equivtest.tensors import Placed, at_rest, same_bits, slice_local


def visit(subject: str, case: Case, backend: Backend) -> tuple[Answer, ...] | None:
    """Runs `subject` on every draw of `case` and returns one `Answer` for each draw, in order.

    If the rank is in no mesh of the case, the result is None.

    A draw is one set of values for the tensors of the case.  `case.poison` determines how new memory is filled. If
    `case.repeats` is True, draw 0 runs once more at the end, after all other draws.

    Raises:
        Misuse: the subject is unknown, takes other cases, or returns no valid result.
        Exception: any exception of the subject.
    """
    function = resolve(subject)
    require_fit(function, case)
    mesh = mesh_for(case, backend.device)
    if mesh is None:
        return None
    with poisoned(case.poison):
        first, *others = (visit_draw(function, case, index, mesh) for index in range(len(case.values)))
        if case.repeats:
            again = visit_draw(function, case, 0, mesh)
            first = replace(first, again=again.tensors, touched=(*first.touched, *again.touched))
    return first, *others


def visit_draw(function: Subject, case: Case, index: int, mesh: DeviceMesh) -> Answer:
    given = hand_out(case, index, mesh)
    before = {name: (tensor.detach().clone(), tensor.requires_grad) for name, tensor in given.items()}
    records = case.records and all(map(is_recordable, mesh.get_all_groups()))
    recorder = Recorder(mesh.mesh.flatten().tolist()) if records else None
    faults.begin()
    with recorder or nullcontext(), faults.operations(), chdir(os.curdir):  # goes back if the subject leaves it
        returned = function(case, mesh, given)
    answers, flags = take_answers(case, returned)
    found = faults.called() if recorder is None else tuple(recorder.found)
    return Answer(answers, flags, tuple(touched(given, before)), collectives=found)


def hand_out(case: Case, index: int, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Returns the subject's inputs: local shards of the drawn global tensors, in the layouts of the case."""
    given, rank = {}, rank_in(mesh)
    for name, tensor in draw(case, index).items():
        said = case.tensors[name]
        local = slice_local(tensor, said.layout, case.mesh_shape, rank).to(mesh.device_type)
        given[name] = (local if said.is_contiguous else strided(local)).requires_grad_(said.needs_grad)
    return given


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the tensor that is not contiguous.

    The last two dims are swapped in memory. A tensor of one dim becomes every second element of a larger tensor.
    """
    if tensor.dim() >= 2:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if tensor.dim() == 1:
        return torch.stack((tensor, tensor), dim=1)[:, 0]
    return tensor


def take_answers(case: Case, returned: object) -> tuple[dict[str, Placed], dict[str, bool]]:
    """Checks the subject's result. Returns the tensors, detached and on the CPU, and their requires_grad flags.

    Raises:
        Misuse: `returned` is no mapping, has a name that the case does not have, or has a value that is no tensor.
    """
    if not isinstance(returned, Mapping):
        raise Misuse(f"a subject must return a dict of tensors by name, got {type(returned).__name__}")
    unknown = sorted(set(map(str, returned)) - set(case.answer_names()))
    if unknown:
        raise Misuse(
            f"the subject returned {', '.join(unknown)}; a {type(case).__name__} may have the answers "
            f"{', '.join(case.answer_names())}"
        )
    answers, flags = {}, {}
    for name, value in returned.items():
        if value is None:
            continue
        tensor = value.local if isinstance(value, Placed) else value
        if not isinstance(tensor, torch.Tensor) or not isinstance(value, DTensor | Placed):
            raise Misuse(f"{name} must be a DTensor, Placed(local tensor, layout) or None, got {type(value).__name__}")
        if isinstance(value, Placed) and value.indices is not None:
            _require_places(case, name, value.indices, value.local)
        flags[name] = tensor.requires_grad
        answers[name] = (
            placed_from_dtensor(value, name)
            if isinstance(value, DTensor)
            else replace(value, local=waited(value.local))
        )
    return answers, flags


def _require_places(case: Case, name: str, indices: torch.Tensor, local: torch.Tensor) -> None:
    """Raises Misuse unless `indices` gives each local element an index into the flattened global tensor."""
    numel = math.prod(case.tensors[name].shape)
    is_list = indices.dtype == torch.int64 and indices.shape == local.shape
    if not is_list or (indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < numel):
        extremes = f" with values {int(indices.min())} to {int(indices.max())}" if indices.numel() else ""
        raise Misuse(
            f"{name}: indices must be int64 of shape {tuple(local.shape)} with values 0 to {numel - 1}, got "
            f"{indices.dtype} of shape {tuple(indices.shape)}{extremes}"
        )


def placed_from_dtensor(tensor: DTensor, name: str) -> Placed:
    """Returns this rank's local tensor of a DTensor, with its layout and global shape. Runs no collective."""
    return Placed(waited(tensor.to_local()), layout_of(tensor, name), tuple(tensor.shape))


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Waits for an asynchronous tensor, such as a gradient still in flight, and returns it on the CPU."""
    return at_rest(tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor)


def touched(given: Mapping[str, torch.Tensor], before: Mapping[str, tuple[torch.Tensor, bool]]) -> list[str]:
    changes = []
    for name, tensor in given.items():
        values, flag = before[name]
        if tensor.requires_grad != flag:
            changes.append(f"{name}: requires_grad was {flag} and is {tensor.requires_grad}")
        if not same_bits(tensor, values):
            changes.append(f"{name}: values have changed")
    return changes
