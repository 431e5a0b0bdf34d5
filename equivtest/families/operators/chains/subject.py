"""Subject that runs a chain of torch's own operators on DTensors.

Source: torch.distributed.tensor.DTensor, its redistribute, to_local and from_local (2.13.0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication, local_map
from torch.distributed.tensor.parallel import loss_parallel

from equivtest.cases.subject import Answers, Given, flattened_mesh, placements_of
from equivtest.families.operators.case_forms import Arguments
from equivtest.families.operators.chains.case import (
    AUTOCAST,
    FLATTENED,
    IMPLICIT,
    INFERENCE,
    LOCAL_MAP,
    LOSS_PARALLEL,
    MODULE,
    NO_GRAD,
    REDISTRIBUTE,
    THROUGH_LOCAL,
    ChainCase,
    Special,
    Step,
    factor_of,
    placements_named,
    run_chain,
    weight_of,
    written,
)
from equivtest.families.operators.subject import run_operator
from equivtest.layout import Layout

Divide = Callable[[torch.Tensor, DeviceMesh, list[Placement]], DTensor]
Wrap = Callable[[DTensor], torch.Tensor]


def wrapped_implicitly(x: DTensor) -> torch.Tensor:
    return x.to_local()


def chains(case: ChainCase, mesh: DeviceMesh, given: Given) -> Answers:
    return run_steps(case, mesh, given, special)


def run_steps(
    case: ChainCase, mesh: DeviceMesh, given: Given, other: Special, wrap: Wrap = wrapped_implicitly
) -> Answers:
    """Runs the chain forward and backward. `other` runs the steps of `SPECIALS`, `wrap` makes operands plain."""

    def call(case: ChainCase, operands: tuple[DTensor, ...], arguments: Arguments) -> tuple[Any, ...]:
        mixed = [wrap(each) if number in case.plain else each for number, each in enumerate(operands)]
        with forward_context(case.context):
            return run_chain(case.steps, mixed, other)

    if case.context == FLATTENED:
        mesh = flattened_mesh(mesh.device_type, case.mesh_shape)
    with whole_context(case.context):
        return run_operator(case, mesh, given, call)  # type: ignore[arg-type]


def forward_context(name: str) -> AbstractContextManager[Any]:
    if name == AUTOCAST:
        return torch.autocast("cpu", torch.bfloat16)
    if name == INFERENCE:
        return torch.inference_mode()
    return torch.no_grad() if name == NO_GRAD else nullcontext()


@contextmanager
def whole_context(name: str) -> Iterator[None]:
    """Enters a torch context for forward and backward. It does not see an error of the block: see findings/77."""
    context = {IMPLICIT: implicit_replication, LOSS_PARALLEL: loss_parallel}.get(name, nullcontext)()
    context.__enter__()
    try:
        yield
    finally:
        context.__exit__(None, None, None)


def special(step: Step, x: torch.Tensor) -> torch.Tensor:
    """Runs a step of `SPECIALS`, which are not operators, on the DTensor x."""
    assert isinstance(x, DTensor)
    name = step[0]
    if name == REDISTRIBUTE:
        return x.redistribute(placements=placements_of(Layout(placements_named(step))))
    if name == THROUGH_LOCAL:
        return DTensor.from_local(
            x.to_local(), x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
        )
    if name == LOCAL_MAP:
        return mapped(step, x)
    return multiplied(step, x) if name == MODULE else written(step, x)


def mapped(step: Step, x: DTensor, gradient: tuple[Placement, ...] | None = None) -> torch.Tensor:
    """Multiplies x by the step's factor in `local_map`, which first redistributes x to the step's placements."""
    factor, placements = factor_of(step), tuple(placements_of(Layout(placements_named(step))))
    call = local_map(
        lambda local: local * factor,
        out_placements=list(placements),
        in_placements=(placements,),
        redistribute_inputs=True,
        in_grad_placements=None if gradient is None else (gradient,),
    )
    found: torch.Tensor = call(x)
    return found


class Weighted(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def multiplied(step: Step, x: DTensor, divide: Divide = distribute_tensor) -> torch.Tensor:
    """Multiplies x by the step's weight, in a module that `distribute_module` makes parallel.

    The module shards its weight, redistributes its input to the step's placements, and replicates its output.
    """
    whole = [Replicate()] * x.device_mesh.ndim

    def divided(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        assert isinstance(module, Weighted)
        parts = divide(module.weight.data, mesh, [Shard(0), *whole[1:]])
        module.weight = nn.Parameter(parts, requires_grad=False)

    def take(_module: nn.Module, inputs: Any, _mesh: DeviceMesh) -> Any:
        return (inputs[0].redistribute(placements=placements_of(Layout(placements_named(step)))),)

    def give(_module: nn.Module, output: Any, _mesh: DeviceMesh) -> Any:
        return output.redistribute(placements=whole)

    module = distribute_module(Weighted(weight_of(step, x)), x.device_mesh, divided, take, give)
    found: torch.Tensor = module(x)
    return found
