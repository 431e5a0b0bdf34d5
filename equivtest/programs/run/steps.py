"""Runs steps of training on a rank, by the harness's own step or by your step function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from equivtest.base.importing import load_named, require_arguments
from equivtest.cases.case import at_step, in_one_step
from equivtest.cases.subject import Answers, Given, copied
from equivtest.errors import Misuse
from equivtest.programs.case import ModuleCase
from equivtest.programs.names import own_names
from equivtest.programs.steps import called_optimizer, updated
from equivtest.tensors import Placed

Inputs = Mapping[str, torch.Tensor]
Once = Callable[[Given, torch.optim.Optimizer | None], Answers]
Held = Callable[[], Answers]


def run_steps(case: ModuleCase, parallel: nn.Module, given: Given, once: Once, held: Held) -> Answers:
    """Runs every step of a case on this rank, and returns the rank's tensors.

    Args:
        once: Function that takes the inputs of one step. It runs one forward and backward, or calls your step function.
        held: Function that returns the parameters and gradients that this rank has at the time of the call.

    Raises:
        Misuse: a step changes whether a parameter needs a gradient, and another step follows.
    """
    optimizer = called_optimizer(case.training.optimizer, parallel) if case.training.optimizer else None
    before, flags = _parameters(case, held()), _flags(parallel)
    answers: Answers = {}
    for step in range(1, case.training.steps + 1):
        if not case.training.step:
            parallel.zero_grad(set_to_none=True)
        left = once({**given, **inputs_of(case, given, step)}, optimizer)
        answers |= {at_step(step, name): _copied(answer) for name, answer in left.items() if name not in before}
        if optimizer is not None:
            if not case.training.step:
                optimizer.step()
            left = _parameters(case, held())
            answers |= {updated(step, name): left[f"param.{name}"] for name in case.parameter_names()}
        now = _flags(parallel)
        changed = [name for name, flag in flags.items() if now.get(name, flag) != flag]
        if step < case.training.steps and changed:
            raise Misuse(
                f"{case.parallelize}: step {step} changes requires_grad of {', '.join(changed)}: the unsharded "
                "gradients are computed with the flags of the first step. Set requires_grad when the module is built"
            )
    if optimizer is None:
        before = _parameters(case, held())  # no optimizer may change a copy
    return before | answers


def _flags(parallel: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in parallel.named_parameters()}


def _parameters(case: ModuleCase, held: Answers) -> Answers:
    names = [f"param.{name}" for name in case.parameter_names()]
    return {name: _copied(held[name]) for name in names}


def inputs_of(case: ModuleCase, given: Given, step: int) -> Given:
    names = [name for name in case.given_names() if in_one_step(name) == name and name not in case.parameter_names()]
    return {name: given[at_step(step, name)] for name in names}


def own_step(
    case: ModuleCase,
    mesh: DeviceMesh,
    parallel: nn.Module,
    inputs: Inputs,
    optimizer: torch.optim.Optimizer | None,
) -> object:
    function = cast("Callable[..., object]", load_named(case.training.step, "step"))
    require_arguments(function, f"step {case.training.step!r}", ("module", "mesh", "micro_batches", "optimizer"))
    return function(parallel, mesh, micro_batches_of(case, inputs), optimizer)


def micro_batches_of(case: ModuleCase, inputs: Inputs) -> list[dict[str, torch.Tensor]]:
    """Cuts a rank's inputs along their rows, as evenly as possible. Inputs without rows stay whole.

    Every rank has the same number of micro-batches, with at least one row in each.  Otherwise a program that reduces
    gradients in every backward would hang.
    """
    num = num_micro_batches(case)
    cut = {name: inputs[name].tensor_split(num) for name in case.row_names() if inputs[name].dim()}
    return [
        {name: cut[name][number] if name in cut else value for name, value in inputs.items()} for number in range(num)
    ]


def num_micro_batches(case: ModuleCase) -> int:
    return min(case.training.micro_batches, *case.rows)


def clipped(case: ModuleCase, parallel: nn.Module) -> torch.Tensor:
    """Clips all gradients by `clip_grad_norm_`. Returns their norm before clipping.

    Raises:
        Misuse: a rank has a part of a parameter as a plain tensor, so that it would clip by the norm of that part
            alone; or torch does not accept the gradients in one call.
    """
    facts, own_name = case.facts.parameters, own_names(parallel)
    way_out = "write a step that clips as its library does, Training(step='package.module:function')"
    meshes = set()
    for name, parameter in parallel.named_parameters():
        fact = facts.get(own_name(name))
        if not isinstance(parameter, DTensor) and (fact is None or tuple(parameter.shape) != fact.shape):
            raise Misuse(
                f"{case.parallelize}: parameter {name} is a plain tensor of shape {tuple(parameter.shape)}: "
                f"clip_grad_norm_ treats it as the whole parameter: {way_out}"
            )
        if parameter.grad is not None:
            meshes.add(parameter.device_mesh if isinstance(parameter, DTensor) else None)
    if len(meshes) > 1:
        raise Misuse(
            f"{case.parallelize}: clip_grad_norm_ takes either plain parameters or DTensors of one mesh, got a "
            f"mixture: {way_out}"
        )
    norm = torch.nn.utils.clip_grad_norm_(parallel.parameters(), case.training.max_norm, case.training.norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _copied(held: DTensor | Placed | None) -> DTensor | Placed | None:
    if held is None:
        return None
    if isinstance(held, Placed):
        return replace(held, local=_with_need(held.local))
    return cast("DTensor", _with_need(held))


def _with_need(tensor: torch.Tensor) -> torch.Tensor:
    return copied(tensor).requires_grad_(tensor.requires_grad)
