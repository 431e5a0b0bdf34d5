"""Pointwise functions of 16 bits: no kernel of torch is beyond its bound, and each bound is narrow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from equivtest.oracle.exact import InexactData
from equivtest.oracle.ranged import Parts, Ranged
from equivtest.oracle.rounding import TORCH_CPU, Bounded
from equivtest.oracle.running import RunningError
from equivtest.programs.boundaries import Capture
from equivtest.programs.oracle.forced import Forced
from equivtest.programs.oracle.held import held_by_one
from equivtest.verdicts.judging import one_thread
from studies.bounded_ops import Margins, Table, new_table
from studies.bounded_pointwise import FUNCTIONS, LEAST, NARROW, ROWS, Found, backward_kernels, functions, not_judged

DENSE = ("sigmoid_backward", "logit_backward with eps", "glu_backward", "mse_loss_backward", "threshold_backward")
Compute = Callable[[nn.Module, torch.Tensor], torch.Tensor]

each_narrow = pytest.mark.parametrize("dtype", NARROW)


def table_of(dtype: str, found: Found) -> Table:
    table = new_table()
    with one_thread():
        for name, actual, bound in found:
            table[name, dtype].add(actual, bound)
    return table


def violations(table: Table) -> dict[str, int]:
    return {name: margins.violations for (name, _), margins in table.items() if margins.violations}


def test_table_of_pointwise_kernels_has_every_backward_kernel() -> None:
    """A kernel of a new release needs a row in `ROWS`, or a reason in `NOT_POINTWISE`."""
    assert not_judged() == []


@each_narrow
def test_pointwise_backward_kernels_are_within_their_bounds_on_every_number(dtype: str) -> None:
    table = table_of(dtype, backward_kernels(dtype, rows=DENSE))

    assert violations(table) == {} and len(table) == len(DENSE)


@each_narrow
def test_pointwise_backward_kernels_are_within_their_bounds_on_sampled_numbers(dtype: str) -> None:
    table = table_of(dtype, backward_kernels(dtype, step=61))

    assert violations(table) == {} and len(table) == len(ROWS)


@each_narrow
def test_pointwise_functions_are_within_their_bounds_on_sampled_numbers(dtype: str) -> None:
    table = table_of(dtype, functions(dtype, step=61))

    assert violations(table) == {} and len(table) == 2 * len(FUNCTIONS)


@each_narrow
def test_errors_of_pointwise_backward_kernels_come_near_their_bounds(dtype: str) -> None:
    table = table_of(dtype, backward_kernels(dtype, rows=DENSE[:-1]))

    assert min(margins.largest for margins in table.values()) > 5 * LEAST


class Gate(nn.Module):
    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.compute, self.sigmoid = compute, nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self.sigmoid, x)


def gated(sigmoid: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = x * sigmoid(x.flip(0))
    return found


def is_right(compute: Compute, dtype: torch.dtype, seed: int) -> bool:
    """Returns the verdict on torch's own run in one process, with each part judged from its actual inputs."""
    source = torch.Generator().manual_seed(seed)
    x, gradient = ((2 * torch.randn(16, 16, generator=source)).to(dtype) for _ in range(2))
    own = x.clone().requires_grad_()
    with Capture(module := nn.Sequential(Gate(compute))) as capture:
        module(own).backward(gradient)
    counted = RunningError(TORCH_CPU[str(dtype).removeprefix("torch.")], 1)
    given, cotangent = counted.exactly(x).requires_grad_(), counted.exactly(gradient)
    run = Forced(module := nn.Sequential(Gate(compute)), counted, held_by_one(capture.named()))
    with counted, run:
        module(given).backward(cotangent)
    assert own.grad is not None and given.grad is not None and "boundary.0.sigmoid" in run.found
    right = counted.bounded(given.grad)
    return not run.wrong and bool(((own.grad.double() - right.value).abs() <= right.allowed).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compute", [nn.Module.__call__, gated], ids=["sigmoid", "gate"])
def test_right_sigmoid_passes_in_one_process(compute: Compute, dtype: torch.dtype) -> None:
    assert [seed for seed in range(24) if not is_right(compute, dtype, seed)] == []


def bound(function: Callable[..., torch.Tensor], *given: torch.Tensor | Ranged, dtype: str = "float16") -> Bounded:
    counted = RunningError(TORCH_CPU[dtype], 1)
    ranged = [each if isinstance(each, Ranged) else counted.exactly(each) for each in given]
    with counted:
        found = function(*ranged)
    return counted.bounded(found)


def off_by(value: list[float], error: float, dtype: torch.dtype = torch.float32) -> Ranged:
    held = torch.tensor(value, dtype=dtype)
    return Parts(held, torch.full_like(held, error).double(), held.double().abs() + error).wrapped()


def test_gradient_of_sigmoid_ten_roundings_off_is_beyond_its_bound() -> None:
    y = torch.rand(4096, generator=torch.Generator().manual_seed(0)).half() * 0.4 + 0.05
    right = bound(torch.ops.aten.sigmoid_backward, torch.ones_like(y), y)
    wrong = (y.double() * (1 - y.double()) * (1 + 10 * 2.0**-11)).half()

    assert bool(((wrong.double() - right.value).abs() > right.allowed).all())


def test_maximum_keeps_the_error_of_the_certainly_larger_operand() -> None:
    one, two = off_by([1.0, 5.0, 1.0], 0.5), off_by([5.0, 1.0, 1.2], 0.25)

    assert bound(torch.maximum, one, two, dtype="float32").allowed.tolist() == pytest.approx([0.25, 0.5, 0.5])
    assert bound(torch.minimum, one, two, dtype="float32").allowed.tolist() == pytest.approx([0.5, 0.25, 0.5])


def test_bound_of_a_clamp_near_its_limit_stays_small() -> None:
    x = off_by([-3.0, 0.0, 3.0], 1e-6)

    assert bound(lambda x: x.clamp(-3.0, max=3.0), x, dtype="float32").allowed.tolist() == pytest.approx([1e-6] * 3)
    assert bool((bound(nn.functional.hardswish, x, dtype="float32").allowed < 1e-5).all())


def test_product_with_a_mask_rounds_nothing() -> None:
    x = torch.tensor([0.1, 3.0, -5.0]).half()

    assert not bound(lambda x: x * torch.tensor([True, False, True]), x).allowed.any()
    assert not bound(torch.neg, x).allowed.any()
    assert bool((bound(lambda x: x * 3, x).allowed > 0).all())


def test_bound_allows_zero_for_a_negative_power_if_the_positive_power_overflows() -> None:
    """bfloat16 computes 1 / (x * x); float16 computes the power itself, 4e-6."""
    right = bound(lambda x: x**-2, torch.tensor([2.0, 498.25]).half())

    assert right.allowed[0] < 1e-3 and 0 < float(right.value[1]) <= float(right.allowed[1])


def test_bound_of_a_power_allows_an_exponent_rounded_to_the_dtype() -> None:
    x = torch.tensor([1000.0]).bfloat16()
    right = bound(lambda x: x**0.3, x, dtype="bfloat16")
    stored = float(torch.tensor(0.3).bfloat16())

    for exponent in (0.3, stored):
        assert abs(float((x.double() ** exponent).bfloat16()) - float(right.value)) <= float(right.allowed)


def test_bound_of_a_power_by_a_tensor_spans_all_that_both_operands_may_be() -> None:
    bases, exponents = off_by([0.5, 3.0, 0.01], 0.1), off_by([2.0, -1.0, 1.0], 0.5)
    right = bound(torch.pow, bases, exponents, dtype="float32")

    for base, exponent in itertools.product((-0.1, 0.0, 0.1), (-0.5, 0.5)):
        found = (Parts.of(bases).value[:2] + base) ** (Parts.of(exponents).value[:2] + exponent)
        assert bool(((found - right.value[:2]).abs() <= right.allowed[:2]).all())
    assert right.allowed.tolist() == pytest.approx([0.6**1.5 - 0.25, 2.9**-0.5 - 1 / 3, math.inf], rel=1e-4)


def test_whole_quotient_is_exact_unless_the_quotient_is_near_a_whole_number() -> None:
    right = bound(lambda x: torch.div(x, 2.0, rounding_mode="floor"), off_by([7.0, 7.95], 0.1), dtype="float32")

    assert right.value.tolist() == [3, 3] and right.allowed.tolist() == [0, pytest.approx(1)]


def test_smallest_element_may_be_any_that_is_smallest_within_its_error() -> None:
    right = bound(lambda x: x.amin(-1), off_by([5.0, -3.0, -2.9], 0.25), dtype="float32")

    assert float(right.value) == -3 and float(right.allowed) == pytest.approx(0.25)


@pytest.mark.parametrize("name", ["hardshrink_backward", "softshrink_backward"])
def test_bound_allows_a_gradient_to_pass_or_stop_at_a_limit_that_the_dtype_rounds(name: str) -> None:
    """0.3 is 0.30005 in float16."""
    x, kernel = torch.tensor([0.2, 0.3, 0.4]).half(), getattr(torch.ops.aten, name)

    assert bound(lambda x: kernel(x, x, 0.3), x).allowed.tolist() == [0, pytest.approx(float(x[1])), 0]


def test_gradient_passes_a_threshold_that_lies_below_x_in_float32() -> None:
    x = torch.tensor([0.3]).half()

    assert float(bound(lambda x: torch.ops.aten.threshold_backward(x, x, 0.3), x).value) == float(x)


def test_bound_of_a_saturated_sigmoid_does_not_grow() -> None:
    """Its derivative is less than 1e-30 there, whatever x is."""
    x = torch.tensor([70.0], dtype=torch.float64)

    assert float(bound(torch.sigmoid, x, dtype="float64").allowed) < 40 * 2.0**-53


def test_hardsigmoid_is_refused_only_in_float64() -> None:
    """For finding 42."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.ones(1, dtype=dtype)
        found = bound(torch.ops.aten.hardsigmoid_backward, x, x, dtype=str(dtype).removeprefix("torch."))
        assert float(found.allowed) < 1e-2
    x = torch.ones(1, dtype=torch.float64)
    with pytest.raises(InexactData, match="no bound is known for hardsigmoid_backward"):
        bound(torch.ops.aten.hardsigmoid_backward, x, x, dtype="float64")


def test_margins_count_numbers_infinities_and_nans_beyond_their_bound() -> None:
    margins = Margins()
    value = torch.tensor([1.0, 1.0, 1.0, torch.inf, torch.nan], dtype=torch.float64)
    margins.add(torch.tensor([1.2, torch.inf, torch.nan, torch.inf, torch.nan]), Bounded(value, torch.full((5,), 0.1)))

    assert margins.violations == 3
