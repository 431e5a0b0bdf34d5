"""A subject with two bugs that have nothing to do with each other, for tests of the search."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.families.zero3.fetch.subject import zero3_fetch_all_gather
from equivtest.tensors import Placed, slice_local

SLOW_S = 1.0


def two_bugs(case: FetchCase, mesh: DeviceMesh, given: Mapping[str, torch.Tensor]) -> dict[str, Placed]:
    """A fetch that copies, but the second parameter comes out negated, and three elements lose their flag.

    Smallest: two parameters of one element; one of three elements.
    """
    answers = {}
    for name, layout in case.layouts().items():
        whole = given[f"param.{name.rpartition('.')[2]}"].detach()
        answers[name] = Placed(slice_local(whole, layout, case.mesh_shape, mesh.get_local_rank()), layout)
    for index, shape in enumerate(case.parameters):
        placed = answers[f"param.{index}"]
        local = -placed.local if index == 1 else placed.local
        answers[f"param.{index}"] = replace(placed, local=local.requires_grad_(has_flag(case, index, shape)))
    return answers


def has_flag(case: FetchCase, index: int, shape: tuple[int, ...]) -> bool:
    """Right below three elements."""
    return case.requires_grad[index] and math.prod(shape) < 3


def dies_of_three(case: FetchCase, mesh: DeviceMesh, given: Mapping[str, torch.Tensor]) -> dict[str, Placed]:
    """A fetch that copies; its last rank kills itself if the first parameter has three elements or more."""
    if _is_culprit(case, mesh):
        os.kill(os.getpid(), signal.SIGKILL)
    return _copies(case, mesh, given)


def hangs_of_three(case: FetchCase, mesh: DeviceMesh, given: Mapping[str, torch.Tensor]) -> dict[str, Placed]:
    """A fetch that copies; its last rank hangs if the first parameter has three elements or more."""
    while _is_culprit(case, mesh):
        time.sleep(0.01)
    return _copies(case, mesh, given)


def _is_culprit(case: FetchCase, mesh: DeviceMesh) -> bool:
    return math.prod(case.parameters[0]) >= 3 and mesh.get_local_rank() == case.world_size - 1


def _copies(case: FetchCase, mesh: DeviceMesh, given: Mapping[str, torch.Tensor]) -> dict[str, Placed]:
    answers = {}
    for name, layout in case.layouts().items():
        index = int(name.rpartition(".")[2])
        local = slice_local(given[f"param.{index}"].detach(), layout, case.mesh_shape, mesh.get_local_rank()).clone()
        flag = name.startswith("param.") and case.requires_grad[index]
        answers[name] = Placed(local.requires_grad_(flag), layout)
    return answers


def slow(case: FetchCase, mesh: DeviceMesh, given: Mapping[str, torch.Tensor]) -> Mapping[str, Placed]:
    """A right fetch that takes its time."""
    time.sleep(SLOW_S)
    return zero3_fetch_all_gather(case, mesh, given)
