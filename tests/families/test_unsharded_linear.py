"""The bits of torch's own linear layer, beside what the integers say."""

from __future__ import annotations

from dataclasses import replace

from equivtest.families.linear.case import LINEAR_MODES, LinearCase
from equivtest.oracle import expect

CASE = LinearCase(
    world_size=1, style="rowwise", leading=(2, 3), in_features=5, out_features=4, bias=True,
    requires_grad=("x", "weight", "bias"), values=tuple((mode, 3) for mode in LINEAR_MODES),
)  # fmt: skip


def test_oracle_expects_no_bits_of_a_linear_case_on_several_ranks() -> None:
    expected = expect(replace(CASE, world_size=2), 0).tensors

    assert all(tensor.bits is None for tensor in expected.values())


def test_oracle_expects_no_gradient_of_a_layer_without_requires_grad() -> None:
    expected = expect(replace(CASE, requires_grad=()), 0).tensors

    assert set(expected) == {"output", "param.weight", "param.bias"}
