"""torch's own unsharded computation in the case's dtype: what a test without an oracle would compare with."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from equivtest.families.collectives.case import OPERANDS, CollectivesCase
from equivtest.families.collectives.oracle import arrange
from equivtest.families.cross_entropy.case import CrossEntropyCase
from equivtest.families.cross_entropy.gathered.case import GatheredCrossEntropyCase
from equivtest.families.embedding.case import NO_PADDING, EmbeddingCase
from equivtest.families.embedding.ways.case import EmbeddingWaysCase, of_style
from equivtest.families.linear.case import LinearCase
from equivtest.families.module.case import ModuleCase, call_builder
from equivtest.families.norm.case import NormCase
from equivtest.families.redistribute.case import RedistributeCase
from equivtest.families.reduction.case import ReductionCase
from equivtest.families.training.case import PerceptronCase, at_step
from equivtest.families.training.mixed.case import MixedCase
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.families.zero3.lifecycle.case import LEARNING_RATE, LifecycleCase
from equivtest.families.zero3.lifecycle.oracle.model import moments
from equivtest.kit.case import Case
from equivtest.kit.values import draw
from equivtest.tensors import DTYPES


@functools.singledispatch
def unsharded(case: Case, index: int) -> dict[str, torch.Tensor]:
    """Answer name -> global tensor of the case's dtype, computed by torch on one process.

    Raises:
        TypeError: nobody has said how for cases of this class.
    """
    raise TypeError(f"no unsharded computation of {type(case).__name__}")


@unsharded.register
def unsharded_linear(case: LinearCase, index: int) -> dict[str, torch.Tensor]:
    """nn.functional.linear, forward and backward."""
    given = {name: tensor.clone() for name, tensor in draw(case, index).items()}
    for name in case.requires_grad:
        given[name].requires_grad_()
    output = functional.linear(given["x"], given["weight"], given.get("bias"))
    if output.requires_grad:
        output.backward(given["cotangent"])
    answers = {"output": output} | {f"param.{name}": given[name] for name in case.parameter_names()}
    answers |= {f"grad.{name}": given[name].grad for name in case.requires_grad}
    return {name: tensor.detach() for name, tensor in answers.items()}


@unsharded.register
def unsharded_embedding(case: EmbeddingCase, index: int) -> dict[str, torch.Tensor]:
    """nn.functional.embedding, forward and backward."""
    given = {name: tensor.clone() for name, tensor in draw(case, index).items()}
    weight = given["weight"].requires_grad_(bool(case.requires_grad))
    padding_idx = None if case.padding_idx == NO_PADDING else case.padding_idx
    output = functional.embedding(given["ids"], weight, padding_idx, scale_grad_by_freq=case.scale_grad_by_freq)
    answers = {"output": output.detach(), "param.weight": weight.detach()}
    if case.requires_grad:
        output.backward(given["cotangent"])
        assert weight.grad is not None
        answers["grad.weight"] = weight.grad
    return answers


@unsharded.register
def unsharded_embedding_ways(case: EmbeddingWaysCase, index: int) -> dict[str, torch.Tensor]:
    """The same for both ways."""
    return {
        of_style(name, style): tensor
        for style in case.styles
        for name, tensor in unsharded_embedding(case.of_style(style), index).items()
    }


@unsharded.register
def unsharded_fetch(case: FetchCase, index: int) -> dict[str, torch.Tensor]:
    """The parameters themselves."""
    given = draw(case, index)
    return {name: given[f"param.{name.rpartition('.')[2]}"] for name in case.answer_names()}


@unsharded.register
def unsharded_lifecycle(case: LifecycleCase, index: int) -> dict[str, torch.Tensor]:
    """Plain parameters, autograd and torch's SGD, on the mean over ranks of what they compute.

    What is refused the oracle's model says: a plain parameter has no status.  Memory is left out.
    """
    given, tensors, saved = draw(case, index), {}, {}
    refused = {moment.number for moment in moments(case, index) if moment.refusal != "none"}
    plain = {i: given[f"param.{i}"].clone().requires_grad_(flag) for i, flag in enumerate(case.requires_grad)}
    for number, operation in enumerate(case.sequence()):
        verb = "" if number in refused else operation.verb
        for i in operation.parameters:
            if verb == "use":
                output = plain[i] * given[f"op{number}.x.{i}"]
                tensors[f"after{number}.output.{i}"] = output.detach()
                if output.requires_grad:
                    output.backward(given[f"op{number}.cotangent.{i}"] / case.world_size)
            elif verb == "update":
                plain[i].data.copy_(given[f"op{number}.new.{i}"])
            elif verb == "save":
                saved[i] = plain[i].detach().clone()
            elif verb == "load":
                plain[i].data.copy_(saved[i])
        if verb == "step" and (trained := [p for p in plain.values() if p.grad is not None]):
            torch.optim.SGD(trained, lr=LEARNING_RATE).step()
            for parameter in trained:
                parameter.grad = None
        for i, parameter in plain.items():
            for kind in ("param", "partition"):
                tensors[f"after{number}.{kind}.{i}"] = parameter.detach().clone()
            if parameter.grad is not None:
                tensors[f"grad.{i}.after{number}"] = parameter.grad.clone()
    return tensors


@unsharded.register
def unsharded_redistribute(case: RedistributeCase, index: int) -> dict[str, torch.Tensor]:
    """The tensor and its cotangent; operands are reduced one after the other, in their own dtype."""
    given = draw(case, index)
    return {"output": _reduced(case, "x", given["x"]), "grad.x": _reduced(case, "cotangent", given["cotangent"])}


def _reduced(case: RedistributeCase, name: str, given: torch.Tensor) -> torch.Tensor:
    op, num_operands = case.reduction(name)
    join = {"max": torch.maximum, "min": torch.minimum}.get(op, torch.add)
    total = functools.reduce(join, given.reshape(num_operands, *case.shape))
    return total / num_operands if op == "avg" else total


@unsharded.register
def unsharded_collectives(case: CollectivesCase, index: int) -> dict[str, torch.Tensor]:
    """Operands reduced one after the other, in their own dtype."""
    given = draw(case, index)
    joins = {"": None, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}
    answers = {}
    for call in case.calls:
        whole, join = given[OPERANDS[call.op]], joins.get(call.op, torch.add)
        whole = whole if join is None else functools.reduce(join, whole)
        answers[call.name] = arrange(case, call.result, whole / case.world_size if call.op == "avg" else whole)
    return answers


@unsharded.register
def unsharded_module(case: ModuleCase, index: int) -> dict[str, torch.Tensor]:
    """The unsharded module, in the case's dtype."""
    given = {name: tensor.clone() for name, tensor in draw(case, index).items()}
    module = call_builder(case.build).to(given["x"].dtype)
    module.load_state_dict({name: given[name] for name in case.parameter_names()})
    x = given["x"].requires_grad_()
    output = module(x)
    output.backward(given["cotangent"])
    answers = {"output": output, "grad.x": x.grad}
    for name, parameter in module.named_parameters():
        answers |= {f"param.{name}": parameter, f"grad.{name}": parameter.grad}
    return {name: tensor.detach() for name, tensor in answers.items()}


@unsharded.register
def unsharded_norm(case: NormCase, index: int) -> dict[str, torch.Tensor]:
    """nn.functional.layer_norm or rms_norm, forward and backward."""
    given = {name: tensor.clone() for name, tensor in draw(case, index).items()}
    for name in case.requires_grad:
        given[name].requires_grad_()
    shape, weight = (case.features,), given.get("weight")
    if case.norm == "layer_norm":
        output = functional.layer_norm(given["x"], shape, weight, given.get("bias"), case.eps)
    else:
        output = functional.rms_norm(given["x"], shape, weight, case.eps)
    if output.requires_grad:
        output.backward(given["cotangent"])
    answers = {"output": output} | {f"param.{name}": given[name] for name in case.parameters}
    answers |= {f"grad.{name}": given[name].grad for name in case.requires_grad}
    return {name: tensor.detach() for name, tensor in answers.items()}


@unsharded.register
def unsharded_cross_entropy(case: CrossEntropyCase, index: int) -> dict[str, torch.Tensor]:
    """nn.functional.cross_entropy, forward and backward."""
    given = draw(case, index)
    x, weight = given["x"].requires_grad_(bool(case.requires_grad)), given.get("weight")
    output = functional.cross_entropy(
        x,
        given["target"],
        weight,
        ignore_index=case.ignore_index,
        reduction=case.reduction,
        label_smoothing=case.label_smoothing if isinstance(case, GatheredCrossEntropyCase) else 0.0,
    )
    answers = {"output": output.detach()}
    if case.requires_grad:
        output.backward(given["cotangent"])
        assert x.grad is not None
        answers["grad.x"] = x.grad
    return answers


@unsharded.register
def unsharded_reduction(case: ReductionCase, index: int) -> dict[str, torch.Tensor]:
    """torch's operation, forward and backward; operands of a partial sum are added first."""
    given = draw(case, index)
    x = (given["x"].sum(0) if case.is_partial else given["x"]).requires_grad_(bool(case.requires_grad))
    if case.op in ("softmax", "log_softmax"):
        output = getattr(torch, case.op)(x, case.dims[0])
    elif case.op == "norm":
        output = torch.linalg.vector_norm(x, 2, case.dims, keepdim=case.keepdim)
    else:
        output = getattr(torch, case.op)(x, case.dims, keepdim=case.keepdim)
    answers = {"output": output.detach()}
    if case.requires_grad:
        output.backward(given["cotangent"])
        assert x.grad is not None
        answers["grad.x"] = x.grad
    return answers


@unsharded.register
def unsharded_perceptron(case: PerceptronCase, index: int) -> dict[str, torch.Tensor]:
    """Two linear layers and their activation, forward, backward and torch's optimizer, step by step."""
    given = draw(case, index)
    parameters = {
        name: given[name].clone().requires_grad_(name in case.requires_grad) for name in case.parameter_names()
    }
    if case.tied:
        parameters["out_proj.weight"] = parameters["in_proj.weight"]
    answers = {f"param.{name}": tensor.detach().clone() for name, tensor in parameters.items()}
    trained = [parameters[name] for name in case.trained_names()]
    optimizer = make_optimizer(case, trained) if case.trains else None
    for step in range(1, case.steps + 1):
        for parameter in parameters.values():
            parameter.grad = None
        x = given[at_step(step, "x")].clone().requires_grad_("x" in case.requires_grad)
        hidden = functional.linear(x, parameters["in_proj.weight"], parameters.get("in_proj.bias"))
        hidden = getattr(functional, case.activation)(hidden)
        hidden = hidden.detach() if case.stops_at_hidden(step) else hidden
        weight = parameters["out_proj.weight"]
        weight = weight.t() if case.tied == "transposed" else weight
        output = functional.linear(hidden, weight, parameters.get("out_proj.bias"))
        if output.requires_grad:
            output.backward(given[at_step(step, "cotangent")])
        answers[at_step(step, "output")] = output.detach()
        graded = case.graded_parameters(step)
        for name in graded:
            parameters[name].grad /= case.num_averaged
        gradients = {"x": x.grad} | {name: parameters[name].grad for name in parameters}
        answers |= {at_step(step, f"grad.{name}"): gradients[name].clone() for name in case.graded_names(step)}
        if optimizer is not None:
            if case.clips:
                norm = torch.nn.utils.clip_grad_norm_(trained, case.clip_norm, float(case.norm_type))
                answers |= {f"step{step}.total_norm": norm}
                answers |= {f"step{step}.clipped.{name}": parameters[name].grad.clone() for name in graded}
            optimizer.step()
            left = {name: parameters[name].detach().clone() for name in case.names_left("param")}
            answers |= {f"step{step}.param.{name}": value for name, value in left.items()}
    return answers


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
            answers |= {f"step{step}.param.{name}": master.detach().clone() for name, master in masters.items()}
            for kind, key in (("momentum", "momentum_buffer"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
                for name in case.trained_names() if kind in case.state_names() else ():
                    answers[f"step{step}.{kind}.{name}"] = optimizer.state[masters[name]][key].clone()
    return answers


def _mixed_part(
    case: MixedCase, step: int, x: torch.Tensor, cotangent: torch.Tensor, masters: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What one rank has of one micro-batch; gradients of parameters not reduced yet."""
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
    """torch's own, with the case's settings."""
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=case.lr, momentum=case.momentum, weight_decay=case.weight_decay)
    return torch.optim.AdamW(parameters, lr=case.lr, weight_decay=case.weight_decay)
