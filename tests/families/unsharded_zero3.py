"""The parameters that ZeRO-3 divides, whole."""

from __future__ import annotations

import torch

from equivtest.cases.values import draw
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.families.zero3.lifecycle.case import LEARNING_RATE, LifecycleCase
from equivtest.families.zero3.lifecycle.oracle.model import moments
from tests.unsharded import unsharded


@unsharded.register
def unsharded_fetch(case: FetchCase, index: int) -> dict[str, torch.Tensor]:
    given = draw(case, index)
    return {name: given[f"param.{name.rpartition('.')[2]}"] for name in case.answer_names()}


@unsharded.register
def unsharded_lifecycle(case: LifecycleCase, index: int) -> dict[str, torch.Tensor]:
    """Uses plain parameters, autograd and torch's SGD, on the mean of the ranks' losses.

    Refusals come from the oracle's model, since a plain parameter has no status.  Memory is left out.
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
