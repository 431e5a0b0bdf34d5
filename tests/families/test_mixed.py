"""Perceptrons of mixed precision: the case, its exact values, and an oracle with a second opinion."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from equivtest.cases.values import draw
from equivtest.families.training.mixed.case import NARROW, MixedCase
from equivtest.oracle import expect
from equivtest.oracle.averages import Averages
from equivtest.oracle.exact import InexactData
from equivtest.oracle.operations import Operations
from tests.drawing import run_of
from tests.families.refusing import refuses
from tests.families.unsharded_training import ALL, BOTH
from tests.unsharded import errors_beside, unsharded


def mixed_case(**fields: Any) -> MixedCase:
    """Three ranks, two micro-batches of two rows each, parameters of 15, 5, 10 and 2 elements."""
    return MixedCase(**{"world_size": 3, "leading": (2,), "micro_batches": 2, "in_features": 3, "hidden_features": 5,
                        "out_features": 2, "biases": BOTH, "requires_grad": ALL, **fields})  # fmt: skip


def test_tensors_of_a_mixed_precision_case_have_the_dtypes_of_its_policy() -> None:
    case = mixed_case(optimizer="sgd", steps=2, output_dtype="float32")

    names = ("x", "capture.in_proj.input", "capture.in_proj.output", "step2.grad.out_proj.input", "output",
             "step2.grad.in_proj.weight", "step1.param.in_proj.weight")  # fmt: skip
    assert [case.dtype_of(name) for name in names] == [
        "float32", "bfloat16", "float32", "bfloat16", "float32", "float32", "float32",
    ]  # fmt: skip
    uncast = mixed_case(casts_inputs=False, param_dtype="float16")
    assert {uncast.dtype_of(name) for name in ("x", "grad.x", "output", "cotangent")} == {"float16"}
    assert {str(draw(uncast, 0)[name].dtype) for name in ("x", "cotangent")} == {"torch.float16"}


test_error_for_an_invalid_case_names_the_invalid_field = refuses(
    mixed_case,
    ({"style": "ddp"}, "mixed precision requires style fsdp2, got 'ddp'"),
    ({"dtype": "bfloat16"}, "must be float32, got 'bfloat16'"),
    ({"output_dtype": "float16"}, "output_dtype must be float32 or param_dtype, bfloat16, got 'float16'"),
    ({"casts_inputs": False, "output_dtype": "float32"}, "casts_inputs=False passes float32 to a layer of bfloat16"),
    (
        {"tied": "transposed", "out_features": 3, "requires_grad": ("in_proj.weight",)},
        "no dtype for the sum of a tied weight's two gradients: omit tied",
    ),
)


def test_gradients_reduced_in_float32_need_more_bits_than_bfloat16_has() -> None:
    """So that a reduction in fewer bits shows."""
    for mode in ("dense", "wide-g"):
        values = tuple((mode, seed) for seed in range(5))
        case = mixed_case(reduce_dtype="float32", world_size=4, micro_batches=3, values=values)
        gradients = [
            tensor.value
            for index in range(len(values))
            for name, tensor in expect(case, index).tensors.items()
            if name in ("grad.in_proj.weight", "grad.out_proj.bias")
        ]
        narrow = dataclasses.replace(case, reduce_dtype="")

        assert max(expect(case, 0).bits_used.values()) > 8 >= max(expect(narrow, 0).bits_used.values())
        assert sum(not torch.equal(found, found.bfloat16().double()) for found in gradients) > len(gradients) / 3


def test_micro_batches_whose_gradient_sum_could_round_raise_inexact_data() -> None:
    averages = Averages(Operations("bfloat16", 1, must_be_exact=True), 1, 2, "float32")
    ones = torch.ones(2, 1, dtype=torch.float64)

    assert averages.total(torch.tensor([[255.0], [256 * 255.0]], dtype=torch.float64)).allowed is None
    with pytest.raises(InexactData, match="gradient of a micro-batch"):
        averages.product(torch.tensor([[255.0, 2.0, 1.0, 1.0]], dtype=torch.float64), torch.cat((ones, ones)))


def test_expected_step_uses_parameters_rounded_to_the_dtype_of_the_layer() -> None:
    case = mixed_case(optimizer="sgd", steps=2, values=(("real", 0),))
    found = unsharded(case, 0)
    left = found["step1.param.in_proj.weight"]

    assert not torch.equal(left, left.bfloat16().float())
    assert max(errors_beside(case, 0, found).values()) <= 1


def test_mixed_precision_cases_are_drawn_with_every_cast() -> None:
    cases = run_of("fsdp2_mixed_mlp")

    assert {case.reduced_dtype for case in cases} == {"float32", *NARROW}
    assert {case.activation_dtype for case in cases} == {"float32", *NARROW}
    assert {case.casts_inputs for case in cases} == {True, False}
    assert {(case.param_dtype, case.reduce_dtype) for case in cases} >= {("bfloat16", "float32"), ("float16", "")}
