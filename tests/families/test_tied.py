"""Perceptrons whose two layers have one weight: the case, its exact values, the oracle, and our ZeRO-3's fetches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from equivtest.errors import Misuse
from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.families.training.deepspeed.case import EngineCase
from equivtest.families.training.sequence.case import MlpCase
from equivtest.families.training.two_axes.case import TwoAxisCase
from equivtest.families.training.zero3.subject.engine import Engine
from equivtest.families.zero3.fetch.subject import Fetch, PartitionedParameter, Status
from equivtest.oracle import expect
from tests.drawing import run_of
from tests.families.refusing import refuses
from tests.families.unsharded_training import BOTH, train

ALL = ("x", "in_proj.weight", "in_proj.bias", "out_proj.bias")
FAMILIES = ("ddp_mlp", "fsdp2_mlp", "zero3_mlp_all_gather", "hsdp_mlp")


def tied_case(**fields: Any) -> DataParallelCase:
    """Three ranks, two micro-batches of two rows each; a weight of 9 or 15 elements."""
    hidden = 5 if fields.get("tied") == "transposed" else 3
    return DataParallelCase(**{"world_size": 3, "leading": (2,), "micro_batches": 2, "in_features": 3,
                               "hidden_features": hidden, "out_features": 3, "biases": BOTH, "requires_grad": ALL,
                               "tied": "same", **fields})  # fmt: skip


def test_tied_weight_is_one_parameter_returned_under_two_names() -> None:
    case = tied_case(optimizer="sgd", steps=2, momentum=0.5)

    assert case.parameter_names() == ("in_proj.weight", "in_proj.bias", "out_proj.bias")
    assert {"param.out_proj.weight", "step2.param.out_proj.weight", "storages"} <= set(case.answer_names())
    assert not {"out_proj.weight", "grad.out_proj.weight", "step1.momentum.out_proj.weight"} & set(case.shapes())
    assert case.layouts()["param.out_proj.weight"] == case.layouts()["param.in_proj.weight"]


def test_step_that_stops_at_the_hidden_activation_still_gives_a_tied_weight_a_gradient() -> None:
    case = tied_case(optimizer="sgd", steps=3, stopped_steps=(2,), requires_grad=("x", "in_proj.weight"))
    found = train(case, torch.float64)

    assert case.graded_parameters(2) == ("in_proj.weight",)
    assert torch.equal(expect(case, 0).tensors["step2.grad.in_proj.weight"].value, found["step2.grad.in_proj.weight"])


test_error_for_an_invalid_case_with_tied_weights_names_the_invalid_field = refuses(
    tied_case,
    ({"out_features": 2}, r"equal in_features, hidden_features and out_features, got \(3, 3, 2\)"),
    ({"tied": "transposed", "out_features": 2}, r"equal in_features and out_features, got \(3, 5, 2\)"),
    ({"values": (("wide-in", 0),)}, "a tied weight is multiplied by itself: use another mode than wide-in"),
    ({"requires_grad": ("out_proj.weight",)}, "requires_grad must list some of x, in_proj.weight, in_proj.bias"),
)


def test_weights_sharded_on_different_dims_are_not_tied() -> None:
    tied = {"world_size": 1, "tied": "same", "requires_grad": ("in_proj.weight",)}

    for make in (MlpCase, TwoAxisCase):
        with pytest.raises(Misuse, match="omit tied"):
            make(**tied)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_quarter_of_training_cases_tie_equal_or_transposed_weights(name: str) -> None:
    cases = run_of(name)
    tied = [case for case in cases if case.tied]

    assert len(cases) / 8 < len(tied) < len(cases) / 2
    assert {case.tied for case in tied} == {"same", "transposed"}


def test_weights_are_tied_in_engines_and_never_under_tensor_parallelism() -> None:
    assert {case.tied for case in run_of("deepspeed_mlp_all_gather")} == {"", "same", "transposed"}
    assert not any(case.tied for case in run_of("fsdp2_tp_mlp"))
    assert EngineCase(world_size=1, tied="same", requires_grad=("in_proj.weight",)).tied


class Three(nn.Module):
    """The first and the last of three layers have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(2, 2, bias=bias) for bias in (False, True, True))
        self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.third(self.second(self.first(x)))
        return found


def test_weight_shared_by_two_layers_is_fetched_once_per_pass() -> None:
    """The layers between them are fetched and released: elements of each fetch, forward and backward."""
    module, fetched = Three(), list[int]()
    right = [parameter.detach().clone() for parameter in module.parameters()]

    def fetch_here(parameters: Sequence[PartitionedParameter], mesh: object) -> Fetch:
        fetched.append(sum(parameter.numel for parameter in parameters))
        for parameter in parameters:
            assert parameter.status is Status.NOT_AVAILABLE
            parameter.whole = parameter.partition.view(parameter.shape)
        return Fetch(parameters, None, lambda: None)

    mesh: Any = SimpleNamespace(size=lambda: 1, get_local_rank=lambda: 0)
    engine = Engine(module, mesh, fetch_here, padding=float("nan"))
    x = torch.ones(1, 2, requires_grad=True)
    engine.gradients.average = lambda gradient: gradient.reshape(-1)  # type: ignore[method-assign]
    engine.backward(module(x), torch.ones(1, 2))

    assert fetched == [4, 6, 2, 6, 6]
    assert not any(layer.is_available for layer in engine.layers.values())
    assert set(engine.gradients.partitions) == {"first.weight", "second.weight", "second.bias", "third.bias"}
    weight, middle, bias, last = (tensor.requires_grad_() for tensor in right)
    ones = torch.ones(1, 2)
    (((ones @ weight.T) @ middle.T + bias) @ weight.T + last).sum().backward()
    assert weight.grad is not None
    assert torch.equal(engine.gradients.partitions["first.weight"], weight.grad.reshape(-1))


def test_case_with_tied_weights_omits_only_the_gradient_of_the_second_weight() -> None:
    tied = tied_case()
    free = dataclasses.replace(tied, tied="", requires_grad=("x", "in_proj.weight", "out_proj.weight"))

    assert set(free.answer_names()) - set(tied.answer_names()) == {"grad.out_proj.weight"}
    assert "storages" not in free.answer_names()
