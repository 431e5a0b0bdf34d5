"""Pointwise functions of 16 bits: no kernel of torch is beyond its bound, and each bound is narrow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from equivtest.kit.oracle.ranged import Parts, Ranged
from equivtest.kit.oracle.rounding import TORCH_CPU, Bounded
from equivtest.kit.oracle.running import RunningError


def bound(function: Callable[..., torch.Tensor], *given: torch.Tensor | Ranged, dtype: str = "float16") -> Bounded:
    counted = RunningError(TORCH_CPU[dtype], 1)
    ranged = [each if isinstance(each, Ranged) else counted.exactly(each) for each in given]
    with counted:
        found = function(*ranged)
    return counted.bounded(found)


def off_by(value: list[float], error: float, dtype: torch.dtype = torch.float32) -> Ranged:
    held = torch.tensor(value, dtype=dtype)
    return Parts(held, torch.full_like(held, error).double(), held.double().abs() + error).wrapped()


def test_the_certainly_larger_of_two_keeps_its_own_error() -> None:
    one, two = off_by([1.0, 5.0, 1.0], 0.5), off_by([5.0, 1.0, 1.2], 0.25)

    assert bound(torch.maximum, one, two, dtype="float32").allowed.tolist() == pytest.approx([0.25, 0.5, 0.5])
    assert bound(torch.minimum, one, two, dtype="float32").allowed.tolist() == pytest.approx([0.5, 0.25, 0.5])


def test_a_clamp_near_its_limit_leaves_nothing_undecided() -> None:
    x = off_by([-3.0, 0.0, 3.0], 1e-6)

    assert bound(lambda x: x.clamp(-3.0, max=3.0), x, dtype="float32").allowed.tolist() == pytest.approx([1e-6] * 3)
    assert bool((bound(nn.functional.hardswish, x, dtype="float32").allowed < 1e-5).all())


def test_a_product_with_a_mask_rounds_nothing() -> None:
    x = torch.tensor([0.1, 3.0, -5.0]).half()

    assert not bound(lambda x: x * torch.tensor([True, False, True]), x).allowed.any()
    assert not bound(torch.neg, x).allowed.any()
    assert bool((bound(lambda x: x * 3, x).allowed > 0).all())


def test_a_negative_power_may_be_zero_where_the_positive_one_overflows() -> None:
    """As bfloat16 computes 1 / (x * x); float16 computes the power itself, 4e-6."""
    right = bound(lambda x: x**-2, torch.tensor([2.0, 498.25]).half())

    assert right.allowed[0] < 1e-3 and 0 < float(right.value[1]) <= float(right.allowed[1])


def test_a_number_in_a_power_may_be_stored() -> None:
    x = torch.tensor([1000.0]).bfloat16()
    right = bound(lambda x: x**0.3, x, dtype="bfloat16")
    stored = float(torch.tensor(0.3).bfloat16())

    for exponent in (0.3, stored):
        assert abs(float((x.double() ** exponent).bfloat16()) - float(right.value)) <= float(right.allowed)


@pytest.mark.parametrize("name", ["hardshrink_backward", "softshrink_backward"])
def test_a_stored_limit_may_stop_a_gradient_or_let_it_pass(name: str) -> None:
    """0.3 is 0.30005 in float16."""
    x, kernel = torch.tensor([0.2, 0.3, 0.4]).half(), getattr(torch.ops.aten, name)

    assert bound(lambda x: kernel(x, x, 0.3), x).allowed.tolist() == [0, pytest.approx(float(x[1])), 0]


def test_a_gradient_passes_a_threshold_that_is_less_in_float32() -> None:
    x = torch.tensor([0.3]).half()

    assert float(bound(lambda x: torch.ops.aten.threshold_backward(x, x, 0.3), x).value) == float(x)


def test_a_saturated_sigmoid_is_no_further_off() -> None:
    """Its derivative is less than 1e-30 there, whatever x is."""
    x = torch.tensor([70.0], dtype=torch.float64)

    assert float(bound(torch.sigmoid, x, dtype="float64").allowed) < 40 * 2.0**-53
