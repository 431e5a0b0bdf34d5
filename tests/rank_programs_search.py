"""A subject with two bugs that have nothing to do with each other, for tests of the search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.fetch import FetchCase
from equivtest.tensors import Placed, slice_local


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
