"""torch's own unsharded computation in the case's dtype: what a test without an oracle would compare with."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from equivtest.cases.base import Case
from equivtest.cases.embedding import NO_PADDING, EmbeddingCase
from equivtest.cases.fetch import FetchCase
from equivtest.cases.linear import LinearCase
from equivtest.cases.values import draw


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
def unsharded_fetch(case: FetchCase, index: int) -> dict[str, torch.Tensor]:
    """The parameters themselves."""
    given = draw(case, index)
    return {name: given[f"param.{name.rpartition('.')[2]}"] for name in case.answer_names()}
