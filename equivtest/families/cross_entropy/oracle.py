"""Computes one cross entropy over sharded classes in float64, and bounds the errors of a correct subject."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from equivtest.base.collective import Collective
from equivtest.cases.values import draw
from equivtest.families.cross_entropy.case import CrossEntropyCase
from equivtest.oracle import expect
from equivtest.oracle.collectives import Collectives, expected_collectives
from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.expected import Expected, ExpectedTensor
from equivtest.oracle.losses import Targets, log_softmax, nll, nll_grad
from equivtest.oracle.rounding import Arithmetic, Bounded
from equivtest.tensors import DTYPES


@expect.register
def expect_cross_entropy(case: CrossEntropyCase, index: int) -> Expected:
    return expect_bounds(case, bound_cross_entropy(case, index))


def expect_bounds(case: CrossEntropyCase, found: Mapping[str, Bounded]) -> Expected:
    """Returns the expected answers in their global shapes. In `found` the gradient has one row per position."""
    shapes, layouts = case.shapes(), case.layouts()
    tensors = {
        name: ExpectedTensor(
            value=_in_shape(case, name, found[name].value),
            allowed=_in_shape(case, name, found[name].allowed),
            layout=layouts[name],
            dtype=case.dtype,
            derivation=found[name].derivation,
            requires_grad=bool(case.requires_grad) if name == "output" else None,
        )
        for name in case.answer_names()
    }
    assert all(tensor.value.shape == shapes[name] for name, tensor in tensors.items())
    return Expected(tensors, {})


def bound_cross_entropy(case: CrossEntropyCase, index: int) -> dict[str, Bounded]:
    """Returns the loss and the logits' gradient by name. The gradient has one row per position."""
    given, arithmetic = draw(case, index), arithmetic_of(case.dtype)
    x = given["x"].movedim(case.class_dim, -1).reshape(-1, case.num_classes)
    targets = targets_of(case, given["target"].reshape(-1), given.get("weight"))
    y = log_softmax(x, arithmetic, ranks=case.class_ranks)
    answers = {"output": nll(y, targets, _arithmetic_of_sum(case, arithmetic), case.reduction)}
    if case.requires_grad:
        cotangent = given["cotangent"].reshape(-1) if case.reduction == "none" else given["cotangent"]
        answers["grad.x"] = nll_grad(y, targets, cotangent, arithmetic, case.reduction)
    return answers


def _arithmetic_of_sum(case: CrossEntropyCase, arithmetic: Arithmetic) -> Arithmetic:
    """Returns the arithmetic of the sum over positions. If ranks divide the positions, each rank stores its sum."""
    return replace(arithmetic, accumulate=case.dtype) if case.row_ranks > 1 else arithmetic


def targets_of(case: CrossEntropyCase, target: torch.Tensor, weight: torch.Tensor | None) -> Targets:
    """Returns the targets with their weights, all with one dim of positions. Ignored positions get the class 0."""
    kept = target != case.ignore_index
    classes = torch.where(kept, target, 0)
    weights = torch.ones(case.num_classes, dtype=torch.float64) if weight is None else weight.double()
    return Targets(classes, kept, weights[classes], weight is not None)


def _in_shape(case: CrossEntropyCase, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name == "output":
        return tensor.reshape(case.shapes()[name])
    return tensor.reshape(*case.positions, case.num_classes).movedim(-1, case.class_dim)


@expected_collectives.register
def cross_entropy_collectives(case: CrossEntropyCase, rank: int) -> Collectives:
    """Returns three all_reduces of one number per position.

    The first all_reduce reduces the maximum, and the second reduces the sum, both in the accumulator's dtype. The third
    reduces the loss. The backward calls no collective, because every rank has the logarithm of the softmax of its own
    classes.

    Source: _log_softmax and _nll_loss_forward in torch/distributed/tensor/parallel/loss.py (2.13.0).
    """
    wide = DTYPES[arithmetic_of(case.dtype).accumulate].itemsize
    sizes = (wide, wide, DTYPES[case.dtype].itemsize)
    return tuple(Collective("all_reduce", case.num_positions * size, "forward") for size in sizes)
