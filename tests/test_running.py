"""Bounds of whole modules: no correct program is beyond them, what is wrong is, what is not known is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from equivtest.cases.module import with_parameters
from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.exact import InexactData
from equivtest.oracle.rounding import Bounded
from equivtest.oracle.running import RunningError
from tests.running_modules import FEATURES, MODULES, REFUSED, Of, SummedOtherwise, of

Tensors = dict[str, torch.Tensor]
SCALES = [(1.0, 0.0), (30.0, 0.0), (1e-3, 0.0), (1.0, 100.0)]
each_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())


def given_of(make: Callable[[], nn.Module], dtype: torch.dtype, scale: float = 1.0, offset: float = 0.0) -> Tensors:
    """x (5, FEATURES) and every parameter, drawn."""
    source = torch.Generator().manual_seed(1)
    shapes = {name: tuple(parameter.shape) for name, parameter in make().named_parameters()}
    given = {name: 0.4 * torch.randn(shape, generator=source) for name, shape in shapes.items()}
    return {name: value.to(dtype) for name, value in given.items()} | {
        "x": (scale * torch.randn(5, FEATURES, generator=source) + offset).to(dtype)
    }


def run(module: nn.Module, given: Tensors) -> Tensors:
    """Output and gradients; the cotangent is 1, 2, 3, ... over the output's last element."""
    given = dict(given)
    x = given.pop("x").requires_grad_()
    with_parameters(module, given)
    output = module(x)
    cotangent = torch.ones_like(output) * (1 + torch.arange(output.shape[-1] if output.dim() else 1))
    torch.autograd.backward(output, cotangent.to(output.dtype).reshape(output.shape))
    grads = {"x": x.grad} | {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"output": output} | {f"grad.{name}": grad for name, grad in grads.items() if grad is not None}


def bound(make: Callable[[], nn.Module], given: Tensors, ranks: int = 2) -> dict[str, Bounded]:
    """What the oracle says of a module."""
    dtype = given["x"].dtype
    mode = RunningError(arithmetic_of(str(dtype).removeprefix("torch.")), ranks)
    ranged = {name: mode.exactly(value.clone()) for name, value in given.items()}
    module = make().to(dtype)
    with mode, sdpa_kernel(SDPBackend.MATH):
        found = run(module, ranged)
    return {name: mode.bounded(tensor) for name, tensor in found.items()}


def actual(
    make: Callable[[], nn.Module], given: Tensors, dtype: torch.dtype, way: AbstractContextManager[object]
) -> Tensors:
    module = make().to(dtype)
    with way:
        found = run(module, {name: value.to(dtype, copy=True) for name, value in given.items()})
    return {name: tensor.detach().double() for name, tensor in found.items()}


def margin(right: dict[str, Bounded], found: Tensors) -> float:
    """The largest error over what is allowed."""
    assert right.keys() == found.keys()
    ratios = [(found[name] - bounded.value).abs() / bounded.allowed for name, bounded in right.items()]
    return max(float(ratio.nan_to_num(nan=0.0).max()) for ratio in ratios)  # 0 / 0, and what is NaN in both


@each_module
@pytest.mark.parametrize(("scale", "offset"), SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_correct_program_is_beyond_the_bound(
    make: Callable[[], nn.Module], dtype: torch.dtype, scale: float, offset: float
) -> None:
    """Neither torch's own kernels, nor sums of shares, nor an exact program that rounds its result once."""
    given = given_of(make, dtype, scale, offset)
    right = bound(make, given)

    assert margin(right, actual(make, given, dtype, nullcontext())) <= 1
    assert margin(right, actual(make, given, dtype, SummedOtherwise(0))) <= 1
    exact = {
        name: tensor.to(dtype).double() for name, tensor in actual(make, given, torch.float64, nullcontext()).items()
    }
    assert margin(right, exact) <= 1


@each_module
def test_a_small_error_is_beyond_the_bound(make: Callable[[], nn.Module]) -> None:
    """In float64 the bound allows no more than a millionth of the root mean square of anything."""
    for name, bounded in bound(make, given_of(make, torch.float64)).items():
        assert 0 < bounded.allowed.max() < 1e-6 * bounded.value.square().mean().sqrt() or bool(
            (bounded.value.abs() <= bounded.allowed).all()
        ), name


def test_a_sigmoid_may_be_zero_where_its_exponential_overflows() -> None:
    """exp(89) is no float32 number; the quotient itself, 1e-39, is."""
    given = {"x": torch.full((1, FEATURES), -89.5)}
    exact = {
        name: tensor.float().double()
        for name, tensor in actual(nn.Sigmoid, given, torch.float64, nullcontext()).items()
    }

    assert margin(bound(nn.Sigmoid, given), exact) <= 1
    assert margin(bound(nn.Sigmoid, given), {name: torch.zeros_like(tensor) for name, tensor in exact.items()}) <= 1


def test_a_gradient_that_cancels_is_zero_within_its_bound() -> None:
    """What is added to all scores of a softmax does not change it."""
    right = bound(
        of(lambda x, w: ((x @ w).sum(-1, keepdim=True) + x).softmax(-1)), given_of(lambda: Of(torch.mm), torch.float64)
    )

    assert bool((right["grad.weight"].value.abs() <= right["grad.weight"].allowed).all())
    assert float(right["grad.weight"].allowed.max()) < 1e-10


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused(name: str) -> None:
    make, told = REFUSED[name]
    with pytest.raises(InexactData, match=told):
        bound(make, given_of(make, torch.float64))


def test_a_choice_that_a_correct_program_may_make_otherwise_allows_anything() -> None:
    """Equal terms added in another order need not be equal."""
    right = bound(
        of(lambda x, w: torch.where((x @ w) < (x @ w.clone()), x, -x)), given_of(lambda: Of(torch.mm), torch.float64)
    )

    assert bool(right["output"].allowed.isinf().all())


def test_more_ranks_and_more_terms_allow_more() -> None:
    make, given = of(torch.mm), given_of(of(torch.mm), torch.float32)

    assert bool((bound(make, given, ranks=8)["output"].allowed > bound(make, given, ranks=1)["output"].allowed).all())


def test_a_module_that_computes_in_another_dtype_rounds_as_that_does() -> None:
    given = given_of(of(torch.mm), torch.float64)
    inside = bound(of(lambda x, w: (x.float() @ w.float()).double()), given)["output"].allowed

    assert bool((inside > 1e6 * bound(of(torch.mm), given)["output"].allowed).all())
