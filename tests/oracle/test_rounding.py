"""The model of floating point: its constants, and what one or more roundings come to."""

from __future__ import annotations

import math

import pytest
import torch

from equivtest.oracle.rounding import (
    TORCH_CPU,
    Arithmetic,
    after_additions,
    bounded,
    gamma,
    growth,
    store,
    underflow,
    unit_roundoff,
)
from equivtest.tensors import DTYPES


@pytest.mark.parametrize(("dtype", "bits"), [("float64", 53), ("float32", 24), ("float16", 11), ("bfloat16", 8)])
def test_unit_roundoff_is_half_the_distance_to_the_next_number(dtype: str, bits: int) -> None:
    assert unit_roundoff(dtype) == 2.0**-bits


@pytest.mark.parametrize(("dtype", "exponent"), [("float32", -150), ("float16", -25), ("bfloat16", -134)])
def test_underflow_loses_at_most_half_the_smallest_subnormal(dtype: str, exponent: int) -> None:
    assert underflow(dtype) == 2.0**exponent
    assert underflow(dtype, flushed=True) == torch.finfo(DTYPES[dtype]).smallest_normal


@pytest.mark.parametrize("dtype", DTYPES)
def test_bound_of_a_stored_value_includes_the_smallest_possible_underflow(dtype: str) -> None:
    """It is not lost to float32, in which half of its own smallest number is zero."""
    value = torch.tensor([4 * underflow(dtype)], dtype=torch.float64)

    assert float(store(value, torch.zeros_like(value), TORCH_CPU[dtype])) >= underflow(dtype) > 0


def test_gamma_is_infinite_if_roundings_may_lose_every_digit() -> None:
    """256 roundings of bfloat16: 256 u = 1."""
    assert gamma(255, 2.0**-8) == 255.0
    assert gamma(256, 2.0**-8) == math.inf


def test_growth_by_one_rounding_is_the_unit_roundoff() -> None:
    assert growth((1, 2.0**-24)) == pytest.approx(2.0**-24, rel=1e-12)
    assert growth((0, 2.0**-8)) == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_storing_a_float64_number_is_within_its_bound(dtype: str) -> None:
    values = torch.randn(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values *= 2.0 ** torch.linspace(-30, 10, 10_000, dtype=torch.float64)  # subnormal in float16 at the lower end
    allowed = store(values, torch.zeros_like(values), TORCH_CPU[dtype])

    assert ((values.to(DTYPES[dtype]).double() - values).abs() <= allowed).all()


def test_bound_of_a_stored_value_that_may_overflow_is_infinite() -> None:
    values = torch.tensor([65504.0, 65000.0], dtype=torch.float64)

    assert store(values, torch.zeros(2), TORCH_CPU["float16"]).tolist()[0] == math.inf
    assert math.isfinite(store(values, torch.zeros(2), TORCH_CPU["float16"]).tolist()[1])


def test_bound_that_is_not_a_number_is_infinite() -> None:
    nan = torch.tensor([math.nan], dtype=torch.float64)

    assert bounded(nan, nan, nan, 1, "").allowed.item() == math.inf


@pytest.mark.parametrize("dtype", DTYPES)
def test_declared_arithmetic_of_a_dtype_names_this_dtype(dtype: str) -> None:
    declared: Arithmetic = TORCH_CPU[dtype]

    assert declared.dtype == declared.reduce == dtype
    assert declared.u_a <= declared.u_o
    assert declared.largest <= declared.largest_a


def test_storing_an_exact_zero_has_no_error() -> None:
    value, error = torch.tensor([0.0, 0.0, 1e-9], dtype=torch.float64), torch.tensor([0.0, 1e-9, 0.0])

    assert (store(value, error, TORCH_CPU["float16"]) > 0).tolist() == [False, True, True]


@pytest.mark.parametrize("count", [4, 8])
def test_additions_in_a_bad_order_come_near_their_bound_but_stay_within_it(count: int) -> None:
    """256 + 1 is 256 in bfloat16, each time; then 256 is subtracted.  With two additions less, it exceeds the bound."""
    computed = torch.tensor(256.0, dtype=torch.bfloat16)
    for term in [*[1.0] * count, -256.0]:
        computed = computed + term
    total, magnitude = torch.tensor(float(count)), torch.tensor(512.0 + count)
    allowed, fewer = (
        after_additions(total, magnitude, torch.zeros(()), number, 2.0**-8) for number in (count + 1, count - 1)
    )

    assert 0.7 * allowed < abs(float(computed) - count) <= allowed
    assert abs(float(computed) - count) > fewer


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_additions_in_random_orders_are_within_their_bound(dtype: str) -> None:
    source, ratios = torch.Generator().manual_seed(0), []
    for _ in range(50):
        left = list(torch.randn(9, 64, generator=source).to(DTYPES[dtype]))
        terms = torch.stack(left).double()
        total, magnitude = terms.sum(0), terms.abs().sum(0)
        while len(left) > 1:
            one, other = (left.pop(int(torch.randint(0, len(left), (), generator=source))) for _ in range(2))
            left.append(one + other)
        allowed = after_additions(total, magnitude, torch.zeros(64), 8, unit_roundoff(dtype))
        ratios.append(((left[0].double() - total).abs() / allowed).max())

    assert 0.2 < max(ratios) <= 1
