"""torch's RowwiseParallel and ColwiseParallel on nn.Linear.

Source: torch/distributed/tensor/parallel/style.py, classes ColwiseParallel and RowwiseParallel
(2.13.0).  A correct style computes what the unsharded nn.Linear computes, forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from equivtest import layout
from equivtest.cases.base import Case
from equivtest.cases.linear import LinearCase
from equivtest.errors import Unsupported
from equivtest.tensors import Placed

Given = Mapping[str, torch.Tensor]
Answers = dict[str, DTensor | Placed | None]


def colwise_linear(case: LinearCase, mesh: DeviceMesh, given: Given) -> Answers:
    """nn.Linear, its weight (N, K) and bias sharded on N by ColwiseParallel."""
    return run_linear(case, mesh, given, ColwiseParallel)


def rowwise_linear(case: LinearCase, mesh: DeviceMesh, given: Given) -> Answers:
    """nn.Linear, its weight (N, K) sharded on K by RowwiseParallel, its bias replicated."""
    return run_linear(case, mesh, given, RowwiseParallel)


def run_linear(
    case: LinearCase,
    mesh: DeviceMesh,
    given: Given,
    style: type[ColwiseParallel] | type[RowwiseParallel],
    module: type[nn.Linear] = nn.Linear,
) -> Answers:
    """Forward and backward of one parallelized linear module, on this rank."""
    plan = style(
        input_layouts=torch_placement(case, "x"),
        output_layouts=torch_placement(case, "output"),
        use_local_output=case.use_local_output,
    )
    layer = parallelize_module(make_linear(case, given, module), mesh, plan)
    x = given["x"].detach().requires_grad_("x" in case.requires_grad)  # shares the harness's memory
    output = layer(as_dtensor(x, case, "x", mesh) if case.x_is_dtensor else x)
    run_backward(output, case, mesh, given["cotangent"])
    return answers(case, layer, x, output)


def make_linear(case: LinearCase, given: Given, module: type[nn.Linear]) -> nn.Linear:
    """The unsharded layer, whole on every rank, as a user builds it before parallelizing."""
    layer = module(case.in_features, case.out_features, bias=case.bias, device="meta")
    for name in case.parameter_names():
        setattr(layer, name, nn.Parameter(given[name].detach(), requires_grad=name in case.requires_grad))
    return layer


def run_backward(output: torch.Tensor, case: Case, mesh: DeviceMesh, cotangent: torch.Tensor) -> None:
    """Feeds the local cotangent, of the output's shape and layout, to backward."""
    if output.requires_grad:
        if isinstance(output, DTensor):
            cotangent = as_dtensor(cotangent, case, "output", mesh)
        torch.autograd.backward(output, cotangent)


def answers(case: LinearCase, layer: nn.Module, x: torch.Tensor, output: torch.Tensor) -> Answers:
    """Output, parameters and the gradients that the case asks for."""
    found: dict[str, torch.Tensor | None] = {"output": output}
    for name in case.parameter_names():
        found[f"param.{name}"] = layer.get_parameter(name)
    for name in case.requires_grad:
        found[f"grad.{name}"] = x.grad if name == "x" else layer.get_parameter(name).grad
    return under_contract(case, found)


def under_contract(case: Case, found: Mapping[str, torch.Tensor | None]) -> Answers:
    """Answers by name: DTensors as they are, plain tensors under the layout of the case's contract."""
    contract = case.layouts()
    return {
        name: tensor if tensor is None or isinstance(tensor, DTensor) else Placed(tensor, contract[name])
        for name, tensor in found.items()
    }


def as_dtensor(local: torch.Tensor, case: Case, name: str, mesh: DeviceMesh) -> DTensor:
    """The DTensor of the contract's shape and layout of `name`, made without a collective.

    Its strides follow from the case alone: taken from the local tensor they would differ between
    ranks where a shard is empty or has dims of size 1, and so would the ranks' collectives.
    """
    given = "cotangent" if name == "output" else name
    whole = torch.empty(case.shapes()[name], device="meta")
    if whole.dim() > 1 and not case.is_contiguous(given):
        whole = whole.transpose(-1, -2).contiguous().transpose(-1, -2)
    placements = (torch_placement(case, name),)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def torch_placement(case: Case, name: str) -> Placement:
    """The contract's placement of `name` in torch's words; the last dim is -1, as users write it."""
    placement = case.layouts()[name].placements[0]
    if isinstance(placement, layout.Shard):
        return Shard(-1 if placement.dim == len(case.shapes()[name]) - 1 else placement.dim)
    return Replicate()


def style_named(name: str) -> Any:
    """A style of torch.distributed.tensor.parallel that not every release has: 2.6 has no PrepareModuleInputOutput.

    Raises:
        Unsupported: this release has it not.
    """
    if not hasattr(parallel, name):
        raise Unsupported(f"torch {torch.__version__} has no {name}: it came with a later release")
    return getattr(parallel, name)
