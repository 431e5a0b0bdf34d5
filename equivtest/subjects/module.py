"""A module of anybody's own, parallelized, in one forward and backward; and one of ours as an example.

Source of the example's plan: torch/distributed/tensor/parallel/style.py (2.13.0), ColwiseParallel and RowwiseParallel;
the gate is that of Shazeer, GLU Variants Improve Transformer (2020), equation 6, with ReLU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

from equivtest.cases.module import ModuleCase, call_builder, with_parameters
from equivtest.errors import Misuse
from equivtest.importing import load_named, require_arguments
from equivtest.subjects.tensor_parallel import Answers, Given, style_named, under_contract
from equivtest.tensors import DTYPES

Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module]


def module(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """What the case's function makes of the unsharded module, on this rank."""
    return run_module(case, mesh, given, cast("Parallelize", load_named(case.parallelize, "parallelize")))


def run_module(case: ModuleCase, mesh: DeviceMesh, given: Given, parallelize: Parallelize) -> Answers:
    """Builds the module whole with the given parameters, parallelizes it, and runs it forward and backward."""
    whole = call_builder(case.build).to(mesh.device_type, DTYPES[case.dtype])
    whole = with_parameters(whole, {name: given[name].detach() for name in case.parameter_names()})
    looks, numbers = _looks_of(whole), _numbers_of_collectives(mesh)
    require_arguments(parallelize, f"parallelize {case.parallelize!r}", ("module", "mesh"))
    parallel = parallelize(whole, mesh)
    if not isinstance(parallel, nn.Module):
        raise Misuse(f"{case.parallelize} must return the parallel module, got {type(parallel).__name__}: return it")
    is_as_it_was = case.world_size > 1 and parallel is whole and _looks_of(whole) == looks
    x = given["x"].detach().requires_grad_()
    output = parallel(x)
    if not isinstance(output, torch.Tensor):
        raise Misuse(f"{case.parallelize}: the parallel module must give one tensor, got {type(output).__name__}")
    torch.autograd.backward(output, _like(output, given["cotangent"]))
    if is_as_it_was and numbers and numbers == _numbers_of_collectives(mesh):
        raise Misuse(
            f"{case.parallelize} leaves the module as it was, and no collective ran: its plan may name parts that the "
            "module does not have"
        )
    found = {"output": output, "grad.x": x.grad}
    parameters = _parameters(case, parallel)
    for name in case.parameter_names():
        found |= {f"param.{name}": parameters[name], f"grad.{name}": parameters[name].grad}
    return under_contract(case, found)


def _numbers_of_collectives(mesh: DeviceMesh) -> list[int]:
    """How many have been called on each of the mesh's groups and on the world; empty where a backend does not count."""
    groups: list[Any] = [*mesh.get_all_groups(), dist.group.WORLD]
    try:
        return [group._get_sequence_number_for_group() for group in groups]
    except (RuntimeError, NotImplementedError):
        return []


def _looks_of(module: nn.Module) -> list[object]:
    """Of a module what parallelizing it mostly changes: its parts, what each one holds, parameters and hooks."""
    looks: list[object] = []
    for name, part in module.named_modules():
        held = {key: len(value) if isinstance(value, dict) else id(value) for key, value in vars(part).items()}
        looks.append((name, id(part), type(part), held))
    for name, parameter in module.named_parameters():
        hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        looks.append((name, id(parameter), parameter.data_ptr(), *map(bool, hooks)))
    return looks


def _like(output: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
    """The whole cotangent as what the output is: a tensor, or a DTensor that every rank holds whole."""
    if not isinstance(output, DTensor):
        return cotangent
    if any(not placement.is_replicate() for placement in output.placements):
        raise Misuse(
            f"the parallel module must give its output whole on every rank, got {output.placements}: redistribute it"
        )
    return DTensor.from_local(cotangent, output.device_mesh, [Replicate()] * output.device_mesh.ndim, run_check=False)


def _parameters(case: ModuleCase, parallel: nn.Module) -> Mapping[str, nn.Parameter]:
    """By the names of the unsharded module, which DistributedDataParallel holds as its `module`."""
    found = {name.removeprefix("module."): parameter for name, parameter in parallel.named_parameters()}
    missing = [name for name in case.parameter_names() if name not in found]
    if missing:
        raise Misuse(
            f"{case.parallelize}: the parallel module has no parameter {missing[0]}, only {', '.join(found)}: keep the "
            "names of the unsharded module"
        )
    return found


class GatedBlock(nn.Module):
    """y = x + W3 (relu(W1 x) * (W2 x)) + b, K features, H hidden ones."""

    def __init__(self, num_features: int, num_hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(num_features, num_hidden, bias=False)
        self.up = nn.Linear(num_features, num_hidden, bias=False)
        self.down = nn.Linear(num_hidden, num_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.change(x)
        return output

    def change(self, x: torch.Tensor) -> Any:
        """What is added to x: a tensor, or a DTensor where the plan leaves it one."""
        return self.down(functional.relu(self.gate(x)) * self.up(x))


def gated_block() -> nn.Module:
    """Two features and five hidden ones, which two and three ranks divide unevenly and four leave one without."""
    return GatedBlock(2, 5)


def tensor_parallel(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Hidden features divided among the ranks, one all_reduce forward.

    They stay DTensors in between: of plain tensors torch takes the global size to be local size times ranks.
    """
    divided = ColwiseParallel(use_local_output=False)
    return parallelize_module(block, mesh, {"gate": divided, "up": divided, "down": RowwiseParallel()})


def sequence_parallel(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Tokens divided around the layers, hidden features within: gathered before, reduced and scattered behind.

    The block is handed all tokens and hands on all; what is added to x is added to each rank's own.
    """
    tokens = Shard(0)
    prepared = style_named("PrepareModuleInputOutput")(
        input_layouts=Replicate(),
        desired_input_layouts=tokens,
        use_local_input=False,
        output_layouts=tokens,
        desired_output_layouts=Replicate(),
    )
    divided = ColwiseParallel(input_layouts=tokens, use_local_output=False)
    summed = RowwiseParallel(output_layouts=tokens, use_local_output=False)
    return parallelize_module(block, mesh, {"": prepared, "gate": divided, "up": divided, "down": summed})
