"""Training without ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch.nn import functional

from equivtest.cases.case import at_step
from equivtest.cases.values import draw
from equivtest.families.training.case import PerceptronCase
from equivtest.families.training.deepspeed.case import EngineCase
from equivtest.families.training.mixed.case import MixedCase
from equivtest.tensors import DTYPES
from tests.unsharded import unsharded

BOTH = ("in_proj", "out_proj")
ALL = ("x", "in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias")


@unsharded.register
def unsharded_perceptron(case: PerceptronCase, index: int) -> dict[str, torch.Tensor]:
    """Two linear layers and their activation, forward, backward and torch's optimizer, step by step."""
    return train(case, DTYPES[case.dtype], index)


def train(case: PerceptronCase, dtype: torch.dtype, index: int = 0) -> dict[str, torch.Tensor]:
    """Computes every answer by torch's own kernels, autograd and optimizers on one process, in `dtype`.

    If the case averages gradients over ranks, they are the whole batch's, divided once.
    """
    values = {name: tensor.to(dtype) for name, tensor in draw(case, index).items()}
    parameters = {n: values[n].clone().requires_grad_(n in case.requires_grad) for n in case.parameter_names()}
    if case.tied:
        parameters["out_proj.weight"] = parameters["in_proj.weight"]
    found = {f"param.{name}": parameter.detach().clone() for name, parameter in parameters.items()}
    found |= {"storages": torch.ones((), dtype=dtype)} if case.tied else {}
    trained = [parameters[name] for name in case.trained_names()]
    optimizer = make_optimizer(case, trained) if case.trains else None
    for step in range(1, case.steps + 1):
        found |= {at_step(step, name): tensor for name, tensor in _one_step(case, step, values, parameters).items()}
        if optimizer is not None:
            found |= _clipped(case, step, parameters)
            optimizer.step()
            found |= _state_after(case, step, optimizer, parameters)
            optimizer.zero_grad()
            change_rate(case, optimizer, step)
    return found


def _one_step(
    case: PerceptronCase, step: int, values: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    x = values[at_step(step, "x")].clone().requires_grad_("x" in case.requires_grad)
    before = functional.linear(x, parameters["in_proj.weight"], parameters.get("in_proj.bias"))
    hidden = getattr(functional, case.activation)(before)
    stops = case.stops_at_hidden(step)
    weight = parameters["out_proj.weight"].t() if case.tied == "transposed" else parameters["out_proj.weight"]
    output = functional.linear(hidden.detach() if stops else hidden, weight, parameters.get("out_proj.bias"))
    found = {"capture.in_proj.input": x, "capture.in_proj.output": before, "capture.out_proj.input": hidden}
    if case.hidden_requires_grad and not stops:
        before.retain_grad()
        hidden.retain_grad()
    if output.requires_grad:
        output.backward(values[at_step(step, "cotangent")])
        for parameter in (parameters[name] for name in case.parameter_names()):
            if parameter.grad is not None:
                parameter.grad /= case.num_averaged
    if case.hidden_requires_grad and not stops:
        found |= {"grad.in_proj.output": before.grad, "grad.out_proj.input": hidden.grad}
    found |= {f"grad.{name}": (x if name == "x" else parameters[name]).grad for name in case.graded_names(step)}
    return {name: tensor.detach().clone() for name, tensor in (found | {"output": output}).items()}


def _clipped(case: PerceptronCase, step: int, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if isinstance(case, EngineCase) and case.gradient_clipping:
        trained = [parameters[name] for name in case.graded_parameters(step)]
        torch.nn.utils.clip_grad_norm_(trained, case.gradient_clipping)
    if not case.clips:
        return {}
    trained = {name: parameters[name] for name in case.graded_parameters(step)}
    norm = torch.nn.utils.clip_grad_norm_(list(trained.values()), case.clip_norm, float(case.norm_type))
    left = {f"step{step}.clipped.{name}": tensor.grad.clone() for name, tensor in trained.items()}
    return {f"step{step}.total_norm": norm, **left}


def _state_after(
    case: PerceptronCase, step: int, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    found = {}
    for kind in case.state_names():
        for name in case.names_left(kind):
            state = optimizer.state.get(parameters[name], {})
            held = {"param": parameters[name], "momentum": state.get("momentum_buffer"), **state}
            found[f"step{step}.{kind}.{name}"] = held[kind].detach().clone()
    if case.tied:
        found[f"step{step}.param.out_proj.weight"] = parameters["out_proj.weight"].detach().clone()
    return found


@unsharded.register
def unsharded_mixed(case: MixedCase, index: int) -> dict[str, torch.Tensor]:
    """The same with the casts of mixed precision, rank by rank and micro-batch by micro-batch."""
    given = draw(case, index)
    masters = {name: given[name].clone().requires_grad_(name in case.requires_grad) for name in case.parameter_names()}
    answers = {f"param.{name}": tensor.detach().clone() for name, tensor in masters.items()}
    trained = [masters[name] for name in case.trained_names()]
    optimizer = make_optimizer(case, trained) if case.trains else None
    for step in range(1, case.steps + 1):
        parts = [
            _mixed_part(case, step, x, cotangent, masters)
            for x, cotangent in zip(
                *(
                    given[at_step(step, name)].chunk(case.world_size * case.micro_batches)
                    for name in ("x", "cotangent")
                ),
                strict=True,
            )
        ]
        graded = [f"grad.{name}" for name in case.graded_parameters(step)]
        found = {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name not in graded}
        for name in graded:
            total = functools.reduce(torch.add, [part[name].to(DTYPES[case.reduced_dtype]) for part in parts])
            found[name] = (total / case.world_size).to(DTYPES[case.dtype])
        for name, master in masters.items():
            master.grad = found[f"grad.{name}"].clone() if f"grad.{name}" in graded else None
        answers |= {at_step(step, name): value for name, value in found.items()}
        if optimizer is not None:
            if case.clips:
                norm = torch.nn.utils.clip_grad_norm_(trained, case.clip_norm, float(case.norm_type))
                answers[f"step{step}.total_norm"] = norm
                for name in case.graded_parameters(step):
                    answers[f"step{step}.clipped.{name}"] = masters[name].grad.clone()
            optimizer.step()
            change_rate(case, optimizer, step)
            answers |= {f"step{step}.param.{name}": master.detach().clone() for name, master in masters.items()}
            kinds = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
            for kind, key in (("momentum", "momentum_buffer"), *zip(kinds, kinds, strict=True)):
                for name in case.trained_names() if kind in case.state_names() else ():
                    answers[f"step{step}.{kind}.{name}"] = optimizer.state[masters[name]][key].clone()
    return answers


def _mixed_part(
    case: MixedCase, step: int, x: torch.Tensor, cotangent: torch.Tensor, masters: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns one rank's tensors of one micro-batch, with unreduced gradients of parameters."""
    narrow, wide = DTYPES[case.param_dtype], DTYPES[case.activation_dtype]
    taken = {n: m.detach().to(narrow).requires_grad_(m.requires_grad) for n, m in masters.items()}
    x = x.clone().requires_grad_("x" in case.requires_grad)
    first = x.to(narrow)
    before = functional.linear(first, taken["in_proj.weight"], taken.get("in_proj.bias")).to(wide)
    hidden = getattr(functional, case.activation)(before).to(narrow)
    stops = case.stops_at_hidden(step)
    last = hidden.detach() if stops else hidden
    output = functional.linear(last, taken["out_proj.weight"], taken.get("out_proj.bias")).to(wide)
    values = {"capture.in_proj.input": first, "capture.in_proj.output": before, "capture.out_proj.input": hidden}
    followed = {"grad.in_proj.output": before, "grad.out_proj.input": hidden} if before.requires_grad else {}
    for tensor in followed.values():
        tensor.retain_grad()
    output.backward(cotangent)
    leaves = {f"grad.{name}": x if name == "x" else taken[name] for name in case.graded_names(step)}
    gradients = {name: tensor.grad for name, tensor in (leaves | ({} if stops else followed)).items()}
    return {name: tensor.detach() for name, tensor in ({"output": output} | values | gradients).items()}


def make_optimizer(case: PerceptronCase, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    maximize, lr = case.variant == "maximize", case.lr / 4 if case.between_steps == "warm_up" else case.lr
    if case.optimizer == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=lr,
            momentum=case.momentum,
            weight_decay=case.weight_decay,
            dampening=0.5 if case.variant == "dampened" else 0.0,
            nesterov=case.variant == "nesterov",
            maximize=maximize,
        )
    return torch.optim.AdamW(
        parameters, lr=lr, weight_decay=case.weight_decay, amsgrad=case.variant == "amsgrad", maximize=maximize
    )


def change_rate(case: PerceptronCase, optimizer: torch.optim.Optimizer, step: int) -> None:
    if case.between_steps == "halve" or (case.between_steps == "warm_up" and step > 2):
        for group in optimizer.param_groups:
            group["lr"] /= 2
    if case.between_steps == "warm_up" and step <= 2:
        for group in optimizer.param_groups:
            group["lr"] *= 2
