"""Runs the unsharded module on each part of a batch, and combines the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from equivtest.programs.case import MEAN_OF_PARTS, ModuleCase, cotangent_of
from equivtest.programs.outputs import named_outputs
from equivtest.programs.reference import call, call_builder, with_parameters
from equivtest.tensors import slice_local

Tensors = Mapping[str, torch.Tensor]
Answers = dict[str, torch.Tensor]


def split(case: ModuleCase, given: Tensors) -> list[dict[str, torch.Tensor]]:
    if not case.is_divided:
        return [{name: tensor.clone() for name, tensor in given.items()}]
    layouts = case.layouts()
    return [
        {name: slice_local(tensor, layouts[name], case.mesh_shape, rank) for name, tensor in given.items()}
        for rank in (case.ranks_of_part(part)[0] for part in range(case.num_parts))
    ]


def run_parts(case: ModuleCase, modules: Sequence[nn.Module], parts: Sequence[Tensors]) -> tuple[Answers, Answers]:
    """Runs a module on each part of a batch.

    The first result has all tensors except the parameters' gradients. The rows of all parts are joined, or the parts
    are stacked. The second result has the parameters' gradients, stacked over the parts.
    """
    answers = [run_module(case, module, part) for module, part in zip(modules, parts, strict=True)]
    likes = {name: tensor for answer in answers for name, tensor in answer.items()}
    stacked = case.stacked_names()
    rows, stacks = {}, {}
    with torch.no_grad():
        for name, like in likes.items():
            is_sum = name.startswith("grad.") and name.removeprefix("grad.") in case.parameter_names()
            cotangents = [part.get(name.removeprefix("grad."), like) for part in parts]
            results = [
                answer[name] if name in answer else torch.zeros(each.shape, dtype=like.dtype)
                for answer, each in zip(answers, cotangents, strict=True)
            ]
            if is_sum:
                stacks[name] = torch.stack(results)
            elif name in stacked:
                rows[name] = torch.stack(results)
            else:
                rows[name] = _below(results) if case.is_divided else results[0]
    return rows, stacks


def _below(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts))


def sum_of(stack: torch.Tensor) -> torch.Tensor:
    return stack.sum(0) if len(stack) > 1 else stack[0]


def reduced(case: ModuleCase, stack: torch.Tensor) -> torch.Tensor:
    return sum_of(stack) / case.num_parts if case.batch == MEAN_OF_PARTS else sum_of(stack)


def make_unsharded(case: ModuleCase, given: Tensors) -> nn.Module:
    module = call_builder(case.build).double()
    return with_parameters(module, {name: given[name] for name in case.parameter_names()})


def run_module(case: ModuleCase, module: nn.Module, given: Tensors) -> Answers:
    inputs = {name: given[name].requires_grad_() if name in case.real_names() else given[name] for name in case.kinds()}
    positional = case.arguments.positional if case.arguments.inputs else tuple(inputs)
    outputs = named_outputs(call(module, positional, inputs), case.judge.outputs, case.build)
    facts = case.facts
    roots = {name: outputs[name] for name in facts.roots}
    if roots:
        cotangents = [
            torch.ones_like(root) if facts.loss else given[cotangent_of(name)].reshape(root.shape).to(root.dtype)
            for name, root in roots.items()
        ]
        torch.autograd.backward(list(roots.values()), cotangents)
    grads = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.is_floating_point()}
    grads |= {name: inputs[name].grad for name in case.real_names()}
    gradients = {f"grad.{name}": grad for name, grad in grads.items() if grad is not None}
    return {**outputs, **gradients, **{f"buffer.{name}": module.get_buffer(name) for name in facts.buffers}}
