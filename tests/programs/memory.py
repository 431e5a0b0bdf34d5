"""Subjects that answer with the contents of new memory, and subjects that remember their calls."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh

from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.tensors import Placed

_calls: list[FetchCase] = []


def finds(case: FetchCase, mesh: DeviceMesh, given: Mapping[str, torch.Tensor]) -> dict[str, Placed]:
    """Each parameter is new memory of its shape, once older memory of that size was given back."""
    answers = {}
    for name in case.given_names():
        del_me = torch.ones(given[name].shape, dtype=given[name].dtype)
        del del_me
        answers[name] = Placed(torch.empty(given[name].shape, dtype=given[name].dtype), case.layouts()[name])
    return answers


def counts_calls(case: FetchCase, mesh: DeviceMesh, given: Mapping[str, torch.Tensor]) -> dict[str, Placed]:
    """The first parameter is the number of calls of this process, this one included."""
    _calls.append(case)
    return {"param.0": Placed(torch.full_like(given["param.0"].detach(), len(_calls)), case.layouts()["param.0"])}


def touches_from_the_third_call_on(
    case: FetchCase, mesh: DeviceMesh, given: Mapping[str, torch.Tensor]
) -> dict[str, Placed]:
    """Adds one to its first parameter, in a process that was called twice before."""
    _calls.append(case)
    if len(_calls) > 2:
        given["param.0"].detach().add_(1)
    return {}
