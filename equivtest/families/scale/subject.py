"""Subject that multiplies a DTensor by a number.

Source: pointwise_strategy in torch/distributed/tensor/_ops/_pointwise_ops.py (2.13.0): each rank computes the product
for its own shard.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.subject import Answers, Given, as_dtensor, run_backward, under_contract
from equivtest.families.scale.case import ScaleCase

Multiply = Callable[[ScaleCase, torch.Tensor], torch.Tensor]


def scale(case: ScaleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Multiplies a DTensor by a number, with torch's own product. Returns y and the gradient of x."""
    return run_scale(case, mesh, given, lambda case, x: x * case.factor)


def run_scale(case: ScaleCase, mesh: DeviceMesh, given: Given, multiply: Multiply) -> Answers:
    x = given["x"].detach().requires_grad_("x" in case.requires_grad)  # shares the harness's memory
    output = multiply(case, as_dtensor(x, case, "x", mesh))
    run_backward(output, case, mesh, given["cotangent"])
    return under_contract(case, {"output": output, **{f"grad.{name}": x.grad for name in case.requires_grad}})
