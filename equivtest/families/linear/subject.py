"""Subjects that run nn.Linear under torch's RowwiseParallel and ColwiseParallel.

Source: torch/distributed/tensor/parallel/style.py, classes ColwiseParallel and RowwiseParallel
(2.13.0).  A correct style computes what the unsharded nn.Linear computes, forward and backward.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from equivtest.cases.subject import (
    Answers,
    Given,
    as_dtensor,
    require_form,
    run_backward,
    torch_placement,
    under_contract,
)
from equivtest.families.linear.case import LinearCase


def colwise_linear(case: LinearCase, mesh: DeviceMesh, given: Given) -> Answers:
    return run_linear(case, mesh, given, ColwiseParallel)


def rowwise_linear(case: LinearCase, mesh: DeviceMesh, given: Given) -> Answers:
    return run_linear(case, mesh, given, RowwiseParallel)


def run_linear(
    case: LinearCase,
    mesh: DeviceMesh,
    given: Given,
    style: type[ColwiseParallel] | type[RowwiseParallel],
    module: type[nn.Linear] = nn.Linear,
) -> Answers:
    plan = style(
        input_layouts=torch_placement(case, "x"),
        output_layouts=torch_placement(case, "output"),
        use_local_output=case.use_local_output,
    )
    layer = parallelize_module(make_linear(case, given, module), mesh, plan)
    x = given["x"].detach().requires_grad_("x" in case.requires_grad)  # shares the harness's memory
    output = layer(as_dtensor(x, case, "x", mesh) if case.x_is_dtensor else x)
    require_form(output, is_plain=case.use_local_output)
    run_backward(output, case, mesh, given["cotangent"])
    return answers(case, layer, x, output)


def make_linear(case: LinearCase, given: Given, module: type[nn.Linear]) -> nn.Linear:
    layer = module(case.in_features, case.out_features, bias=case.bias, device="meta")
    for name in case.parameter_names():
        setattr(layer, name, nn.Parameter(given[name].detach(), requires_grad=name in case.requires_grad))
    return layer


def answers(case: LinearCase, layer: nn.Module, x: torch.Tensor, output: torch.Tensor) -> Answers:
    found: dict[str, torch.Tensor | None] = {"output": output}
    for name in case.parameter_names():
        found[f"param.{name}"] = layer.get_parameter(name)
    for name in case.requires_grad:
        found[f"grad.{name}"] = x.grad if name == "x" else layer.get_parameter(name).grad
    return under_contract(case, found)
