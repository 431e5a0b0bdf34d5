"""Subjects that run nn.LayerNorm and nn.RMSNorm under torch's SequenceParallel.

Source: torch/distributed/tensor/parallel/style.py, class SequenceParallel (2.13.0).  Each rank
normalizes its part of the sequence; parameters are replicated.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from equivtest.cases.subject import Answers, Given, as_dtensor, require_form, run_backward, under_contract
from equivtest.families.norm.case import NormCase


def sequence_layer_norm(case: NormCase, mesh: DeviceMesh, given: Given) -> Answers:
    layer = nn.LayerNorm(case.features, case.eps, bool(case.parameters), bias="bias" in case.parameters, device="meta")
    return run_norm(case, mesh, given, layer)


def sequence_rms_norm(case: NormCase, mesh: DeviceMesh, given: Given) -> Answers:
    return run_norm(case, mesh, given, nn.RMSNorm(case.features, case.eps, bool(case.parameters), device="meta"))


def run_norm(case: NormCase, mesh: DeviceMesh, given: Given, layer: nn.Module) -> Answers:
    for name in case.parameters:
        setattr(layer, name, nn.Parameter(given[name].detach(), requires_grad=name in case.requires_grad))
    plan = SequenceParallel(sequence_dim=case.sequence_dim, use_local_output=case.use_local_output)
    layer = parallelize_module(layer, mesh, plan)
    x = given["x"].detach().requires_grad_("x" in case.requires_grad)  # shares the harness's memory
    output = layer(as_dtensor(x, case, "x", mesh) if case.x_is_dtensor else x)
    require_form(output, is_plain=case.use_local_output)
    run_backward(output, case, mesh, given["cotangent"])
    return norm_answers(case, layer, x, output)


def norm_answers(case: NormCase, layer: nn.Module, x: torch.Tensor, output: torch.Tensor) -> Answers:
    found: dict[str, torch.Tensor | None] = {"output": output}
    found |= {f"param.{name}": layer.get_parameter(name) for name in case.parameters}
    for name in case.requires_grad:
        found[f"grad.{name}"] = x.grad if name == "x" else layer.get_parameter(name).grad
    return under_contract(case, found)
