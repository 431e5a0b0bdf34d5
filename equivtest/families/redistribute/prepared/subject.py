"""Subject that runs nn.Identity under PrepareModuleInput, PrepareModuleOutput or PrepareModuleInputOutput.

Source: torch/distributed/tensor/parallel/style.py (2.13.0). Each style wraps a plain tensor as a DTensor under the
first layout, and redistributes the DTensor to the desired layout. Then the style passes the DTensor on, or its local
tensor if that is requested.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    parallelize_module,
)

from equivtest.cases.subject import Answers, Given, own_operand, placement_of, require_form, under_contract
from equivtest.families.redistribute.prepared.case import PreparedCase
from equivtest.families.redistribute.subject import as_dtensor, take_cotangent
from equivtest.layout import parse_placement


def prepared_module(case: PreparedCase, mesh: DeviceMesh, given: Given) -> Answers:
    return run_prepared(case, mesh, given, plan_of(case))


def plan_of(case: PreparedCase) -> ParallelStyle:
    """Returns the parallel style for `case.style`, with x passed by position or by name."""
    first, *middle, last = (placement_of(parse_placement(step)) for step in case.steps)
    if case.style == "output":
        return PrepareModuleOutput(
            output_layouts=first, desired_output_layouts=last, use_local_output=case.use_local_output
        )
    given, wanted = (first, middle[0]) if middle else (first, last)
    if case.as_kwarg:
        layouts = {"input_kwarg_layouts": {"input": given}, "desired_input_kwarg_layouts": {"input": wanted}}
    else:
        layouts = {"input_layouts": given, "desired_input_layouts": wanted}  # type: ignore[dict-item]
    if case.style == "input":
        return PrepareModuleInput(**layouts, use_local_output=case.use_local_output)  # type: ignore[arg-type]
    style: ParallelStyle = PrepareModuleInputOutput(
        **layouts,  # type: ignore[arg-type]
        use_local_input=case.use_local_input,
        output_layouts=wanted,
        desired_output_layouts=last,
        use_local_output=case.use_local_output,
    )
    return style


def run_prepared(case: PreparedCase, mesh: DeviceMesh, given: Given, plan: ParallelStyle) -> Answers:
    x = own_operand(given["x"], case.operand_layout("x"))
    if case.x_is_dtensor:
        x = as_dtensor(case, mesh, x, "x")
    x.requires_grad_(bool(case.requires_grad))
    module = parallelize_module(nn.Identity(), mesh, plan)
    output = module(input=x) if case.as_kwarg else module(x)
    require_form(output, is_plain=case.use_local_output)
    if output.requires_grad:
        torch.autograd.backward(output, take_cotangent(case, mesh, given["cotangent"]))
    found: dict[str, torch.Tensor | None] = {"output": output}
    return under_contract(case, found | {f"grad.{name}": x.grad for name in case.requires_grad})
