"""Computes the result of one dropout from the elements that the subject dropped.

Letters: p probability of being dropped, u_a and u_o unit roundoffs of accumulation and storage.

The subject chooses which elements to drop. The oracle reads the choice from the ranks' output: the dropped elements are
zeros in the output, and x has no zeros if elements may be dropped. Another claim judges whether chance made the choice.
Each kept element is x / (1 - p), and its gradient is the cotangent / (1 - p). If 1 - p is a power of two nothing
rounds. Otherwise 1 - p in float64, its conversion, its reciprocal and the product each round once. With p = 1 all
elements are zero. With p = 0, and in eval mode, nothing is computed.

Source: _dropout in ATen/native/Dropout.cpp, torch.nn.Dropout (2.13.0).
"""

from __future__ import annotations

import math

import torch

from equivtest.cases.values import draw
from equivtest.families.dropout.case import DropoutCase
from equivtest.oracle import expect, expect_held
from equivtest.oracle.collectives import Collectives, expected_collectives
from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.expected import Expected, ExpectedTensor
from equivtest.oracle.held import Held, put_together
from equivtest.oracle.operations import Found
from equivtest.oracle.rounding import U_REFERENCE, bounded, growth, store

_GIVEN = {"output": "x", "grad.x": "cotangent"}


@expect.register
def expect_dropout(case: DropoutCase, index: int) -> Expected:
    """Returns the answers of a dropout that keeps every element, or drops every element because p = 1."""
    return _expect(case, index, torch.full(case.shape, case.p < 1 or not case.training))


@expect_held.register
def expect_dropout_held(case: DropoutCase, index: int, held: Held) -> Expected:
    """Returns the answers. If chance decides, the zeros of the ranks' output in `held` are the dropped elements."""
    output = put_together(held, "output", case.shape, case.mesh_shape) if case.drops_some else None
    return expect_dropout(case, index) if output is None else _expect(case, index, output != 0)


def _expect(case: DropoutCase, index: int, kept: torch.Tensor) -> Expected:
    given, layouts = draw(case, index), case.layouts()
    tensors = {}
    for name in case.answer_names():
        found = _scale(case, given[_GIVEN[name]], kept)
        tensors[name] = ExpectedTensor(
            value=found.value,
            allowed=found.allowed,
            layout=layouts[name],
            dtype=case.dtype,
            derivation=found.derivation,
            requires_grad=bool(case.requires_grad) if name == "output" else None,
            bits=given[_GIVEN[name]] if case.is_identity else None,
        )
    return Expected(tensors, {}, drops={"output": case.p} if case.drops_some else {})


def _scale(case: DropoutCase, given: torch.Tensor, kept: torch.Tensor) -> Found:
    """Returns `given` / (1 - p) with its allowed error, and zero outside of the mask `kept`."""
    if case.is_identity:
        return Found.copy_of(given.double())
    if not bool(kept.any()):
        return Found(torch.zeros(case.shape, dtype=torch.float64), None, "equal: everything is dropped")
    value = torch.where(kept, given.double() / (1 - case.p), 0.0)
    if math.frexp(1 - case.p)[0] == 0.5:
        return Found(value, None, f"equal: divided by {1 - case.p}, a power of two, or dropped")
    arithmetic = arithmetic_of(case.dtype)
    error = store(value, growth((1, U_REFERENCE), (1, arithmetic.u_a)) * value.abs(), arithmetic, times=2)
    derivation = f"dropped, or the roundings of 1 - p twice, of its reciprocal and of the product in {case.dtype}"
    found = bounded(value, torch.where(kept, error, 0.0), value.abs(), 1, derivation)
    return Found.within(found)


@expected_collectives.register
def dropout_collectives(case: DropoutCase, rank: int) -> Collectives:
    """Returns no collectives, because each rank drops elements of its own shard.

    Source: SequenceParallel in torch/distributed/tensor/parallel/style.py; the strategies of
    torch/distributed/tensor/_ops/_random_ops.py keep the operand's placements (2.13.0).
    """
    return ()
