"""16-bit kernels under running error: none exceeds its bound, and each bound proves something."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from equivtest.oracle.declared import declared
from equivtest.oracle.rounding import TORCH_CPU, Bounded
from equivtest.oracle.running import RunningError
from equivtest.verdicts.judging import one_thread
from studies.bounded_kernels import kernels
from studies.bounded_ops import Table, new_table, run_round
from tests.oracle.running_modules import Of, of
from tests.oracle.running_programs import Tensors, actual, bound_of, given_of

each_narrow = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


@pytest.fixture(scope="module")
def table() -> Table:
    found = new_table()
    with one_thread():
        for seed in (0, 5):
            run_round(seed, found, (kernels,))
    return found


def test_every_kernel_is_within_its_running_bound(table: Table) -> None:
    assert {key: margins.violations for key, margins in table.items() if margins.violations} == {}
    assert sum(margins.elements for margins in table.values()) > 100_000


def bound(function: Callable[..., torch.Tensor], given: Tensors, dtype: str, ranks: int = 2) -> Bounded:
    counted = RunningError(TORCH_CPU[dtype], ranks)
    ranged = [counted.exactly(each.to(getattr(torch, dtype))) for each in given.values()]
    with counted:
        found = function(*ranged)
    return counted.bounded(found)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def width(found: Bounded) -> float:
    """The median allowance over the root mean square."""
    return float(found.allowed.median() / found.value.square().mean().sqrt())


@each_narrow
@pytest.mark.parametrize(
    "function",
    [functional.silu, functional.gelu, torch.sigmoid, lambda x: x.softmax(-1), lambda x: functional.rms_norm(x, (64,)),
     lambda x: functional.layer_norm(x, (64,))],
    ids=["silu", "gelu", "sigmoid", "softmax", "rms norm", "layer norm"],
)  # fmt: skip
def test_bound_of_a_value_that_is_stored_once_is_about_two_roundings(
    function: Callable[..., torch.Tensor], dtype: str
) -> None:
    """One in each of two programs, and a little of float32's."""
    found = bound(function, {"x": normal(5, 64)}, dtype)

    assert bool((found.allowed < 2.1 * TORCH_CPU[dtype].u_o * found.value.abs() + 1e-4).all())


@each_narrow
def test_long_sum_of_16_bits_has_the_bound_of_its_accumulator(dtype: str) -> None:
    """A rounding of float32 for each term, one of 16 bits for each share: 512 terms are concluded on."""
    assert width(bound(torch.mm, {"x": normal(4, 512), "w": normal(512, 4)}, dtype)) < 0.1


def test_bound_is_wider_on_a_device_that_accumulates_in_16_bits() -> None:
    given = {"x": normal(4, 64), "w": normal(64, 4)}
    record = replace(TORCH_CPU["bfloat16"], accumulate="bfloat16")
    counted = RunningError(record, 2)
    ranged = [counted.exactly(each.bfloat16()) for each in given.values()]
    with declared(TORCH_CPU | {"bfloat16": record}), counted:
        found = torch.mm(*ranged)

    assert width(counted.bounded(found)) > 10 * width(bound(torch.mm, given, "bfloat16"))


@each_narrow
def test_bound_of_an_unknown_kernel_allows_rounding_every_intermediate_result(dtype: str) -> None:
    """torch's decomposition of a norm of groups computes in float32; its kernel is not read."""
    x = {"x": normal(4, 8)}

    assert width(bound(lambda x: functional.group_norm(x, 2), x, dtype)) > 3 * width(
        bound(lambda x: functional.layer_norm(x, (8,)), x, dtype)
    )


def test_float32_module_under_autocast_rounds_to_16_bits_like_torch() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 8), nn.GELU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.inner(x)

    given = given_of(Mixed, torch.float32)
    right, found = bound_of(Mixed, given), actual(Mixed, given, torch.float32, nullcontext())

    assert all(bool(((found[name] - each.value).abs() <= each.allowed).all()) for name, each in right.items())
    assert 2.0**-9 < width(right["output"]) < 0.1


@each_narrow
def test_bound_of_a_grouped_mm_is_about_as_wide_as_the_bound_of_mm(dtype: str) -> None:
    x, w, ends = normal(8, 48), normal(2, 48, 16), torch.tensor([3, 8], dtype=torch.int32)
    grouped = bound(lambda x, w: functional.grouped_mm(x, w, offs=ends), {"x": x, "w": w}, dtype)

    assert width(grouped) < 1.5 * width(bound(torch.mm, {"x": x, "w": w[0]}, dtype))


def test_scattered_constant_is_exact() -> None:
    """For example -1 in the gradient of a cross entropy."""
    make = of(lambda x, w: functional.cross_entropy(x @ w, torch.arange(5)))
    given = given_of(lambda: Of(torch.mm), torch.float32)
    assert all(bool((each.allowed < 1e-4).all()) for each in bound_of(make, given).values())


def test_bound_of_addmm_allows_adding_each_term_to_the_bias_in_turn() -> None:
    x, weight, bias = torch.full((1, 400), 2.0**-13), torch.full((400, 1), 2.0**-13), torch.ones(1)
    counted = RunningError(TORCH_CPU["float32"], 1)
    ranged = [counted.exactly(each) for each in (bias, x, weight)]
    with counted:
        found = torch.addmm(*ranged)
    right = counted.bounded(found)
    in_order = bias.clone()
    for term in (x * weight.T).flatten():
        in_order = in_order + term

    assert 2.0**-19 < float((in_order.double() - right.value).abs()) <= float(right.allowed)


@each_narrow
def test_bound_allows_an_attention_backward_decomposed_in_float32(dtype: str) -> None:
    """Like torch on devices other than the CPU: its backward multiplies by the output before it was stored."""
    kind = getattr(torch, dtype)
    q, k, v, g = (4 * normal(4, 2, 5, 8)[place : place + 1].to(kind).requires_grad_() for place in range(4))
    with sdpa_kernel(SDPBackend.MATH):
        own = torch.autograd.grad(functional.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), g)
    held = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=True)
    counted = RunningError(TORCH_CPU[dtype], 1)
    given = [counted.exactly(each.detach()) for each in (g, q, k, v, *held)]
    with counted:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, dropout_p=0.0, is_causal=True
        )

    for grad, each in zip(own, found, strict=True):
        right = counted.bounded(each)
        assert bool(((grad.double() - right.value).abs() <= right.allowed).all())
