"""A module's bound, and what other programs than the oracle's make of the same module and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.rounding import Bounded
from equivtest.oracle.running import RunningError
from equivtest.programs.case import with_parameters
from tests.oracle.running_modules import FEATURES, SummedOtherwise

Tensors = dict[str, torch.Tensor]
SCALES = [(1.0, 0.0), (30.0, 0.0), (1e-3, 0.0), (1.0, 100.0)]
"""(scale, offset) of x."""


def given_of(
    make: Callable[[], nn.Module], dtype: torch.dtype, scale: float = 1.0, offset: float = 0.0, seed: int = 1
) -> Tensors:
    """x (5, FEATURES) and every parameter, drawn."""
    source = torch.Generator().manual_seed(seed)
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


def bound_of(make: Callable[[], nn.Module], given: Tensors, ranks: int = 2) -> dict[str, Bounded]:
    dtype = given["x"].dtype
    mode = RunningError(arithmetic_of(str(dtype).removeprefix("torch.")), ranks)
    ranged = {name: mode.exactly(value) for name, value in given.items()}
    module = make().to(dtype)
    with mode, sdpa_kernel(SDPBackend.MATH):
        found = run(module, ranged)
    return {name: mode.bounded(tensor) for name, tensor in found.items()}


def actual(
    make: Callable[[], nn.Module], given: Tensors, dtype: torch.dtype, way: AbstractContextManager[object]
) -> Tensors:
    with way:
        found = run_in(make, given, dtype)
    return {name: tensor.detach().double() for name, tensor in found.items()}


def run_in(make: Callable[[], nn.Module], given: Tensors, dtype: torch.dtype) -> Tensors:
    """Output and gradients of the module in a dtype; some may be of another."""
    return run(make().to(dtype), {name: value.to(dtype, copy=True) for name, value in given.items()})


def programs(make: Callable[[], nn.Module], given: Tensors, seed: int = 0) -> Iterator[Tensors]:
    """Yields the results of torch's own kernels, of sums of shares, and of an exact program that rounds once."""
    dtype = given["x"].dtype
    yield actual(make, given, dtype, nullcontext())
    yield actual(make, given, dtype, SummedOtherwise(seed))
    exact, own = actual(make, given, torch.float64, nullcontext()), run_in(make, given, dtype)
    yield {name: tensor.to(own[name].dtype).double() for name, tensor in exact.items()}
