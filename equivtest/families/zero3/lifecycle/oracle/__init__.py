"""Computes the parameters' values and statuses, and the memory, after each operation."""

from __future__ import annotations

import torch

from equivtest.families.zero3.lifecycle.case import REFUSALS, STATUSES, LifecycleCase
from equivtest.families.zero3.lifecycle.oracle.costs import memory_after
from equivtest.families.zero3.lifecycle.oracle.model import Moment, moments
from equivtest.oracle import expect
from equivtest.oracle.expected import COPIED, Expected, ExpectedTensor

TOLD = "equal: the state of the unsharded model"
COMPUTED = "equal: integers times a power of two"


@expect.register
def expect_lifecycle(case: LifecycleCase, index: int) -> Expected:
    layouts, tensors = case.layouts(), {}
    for moment in moments(case, index):
        for name, (value, dtype) in _values(case, moment).items():
            why = TOLD if dtype == "int64" else COPIED if ".param." in name else COMPUTED
            tensors[name] = ExpectedTensor(value, None, layouts[name], dtype, why, _flag(case, name))
    return Expected(tensors, {})


def _values(case: LifecycleCase, moment: Moment) -> dict[str, tuple[torch.Tensor, str]]:
    """Returns (value in float64, dtype name) of every answer that exists after one operation."""
    here, parameters = f"after{moment.number}", moment.parameters.values()
    told = {
        f"{here}.refusal": REFUSALS.index(moment.refusal),
        f"{here}.status": [STATUSES.index(parameter.status) for parameter in parameters],
        f"{here}.has_gradient": [parameter.gradient is not None for parameter in parameters],
    }
    if case.measures:
        told[f"memory.{here}"] = memory_after(case, moment)
    found = {name: (torch.tensor(value, dtype=torch.float64), "int64") for name, value in told.items()}
    for index, parameter in moment.parameters.items():
        dtype = case.dtype_of(index)
        found[f"{here}.partition.{index}"] = parameter.value, dtype
        if parameter.status == "available":
            found[f"{here}.param.{index}"] = parameter.value, dtype
        if parameter.gradient is not None:
            found[f"grad.{index}.{here}"] = parameter.gradient, dtype
        if index in moment.outputs:
            found[f"{here}.output.{index}"] = moment.outputs[index], dtype
    return found


def _flag(case: LifecycleCase, name: str) -> bool | None:
    """Returns the requires_grad of a whole parameter. It does not matter for any other answer."""
    return case.requires_grad[int(name.rpartition(".")[2])] if ".param." in name else None
