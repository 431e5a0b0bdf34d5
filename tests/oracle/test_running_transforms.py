"""Bounds of Fourier transforms hold for torch's own algorithms and for a plain sum of products, and for little else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.exact import InexactData
from equivtest.oracle.ranged import Ranged
from equivtest.oracle.rounding import Bounded
from equivtest.oracle.running import RunningError

Transform = Callable[[torch.Tensor], torch.Tensor]


def of_pairs(name: str, **how: Any) -> Transform:
    return lambda x: torch.view_as_real(getattr(torch.fft, name)(torch.view_as_complex(x), **how))


def to_reals(name: str, **how: Any) -> Transform:
    return lambda x: getattr(torch.fft, name)(torch.view_as_complex(x), **how)


def of_reals(name: str, **how: Any) -> Transform:
    return lambda x: torch.view_as_real(getattr(torch.fft, name)(x[..., 0], **how).resolve_conj())


TRANSFORMS: dict[str, Transform] = {
    "forward": of_pairs("fft", dim=1),
    "inverse": of_pairs("ifft", dim=1),
    "of two dims": of_pairs("fftn", norm="ortho"),
    "of fewer numbers": of_pairs("fft", n=2, dim=0),
    "of more numbers": of_pairs("fft", n=9, dim=0),
    "of real numbers": of_reals("rfft", norm="forward"),
    "of real numbers in two dims": of_reals("rfftn"),
    "inverse of real numbers": of_reals("ihfft"),
    "to real numbers": to_reals("irfft", n=6),
    "to an odd number of real numbers": to_reals("irfft", n=5),
    "to real numbers in two dims": to_reals("irfftn", norm="ortho"),
    "of conjugates to real numbers": to_reals("hfft"),
}


def run(transform: Transform, x: torch.Tensor) -> list[torch.Tensor]:
    """Returns the result and the gradient of x, with the cotangent 1, 2, 3, ..."""
    x = x.requires_grad_()
    result = transform(x)
    cotangent = (1.0 + torch.arange(result.numel(), dtype=result.dtype)).reshape(result.shape)
    return [result.detach(), *torch.autograd.grad(result, x, cotangent)]


def bounds(transform: Transform, x: torch.Tensor) -> list[Bounded]:
    mode = RunningError(arithmetic_of(str(x.dtype).removeprefix("torch.")), ranks=2)
    exact = mode.exactly(x)
    with mode:
        found = run(transform, exact)
    return [mode.bounded(each) for each in found]


def margin(right: Bounded, actual: torch.Tensor) -> float:
    """Returns the largest error, divided by the error that the bound allows."""
    error = (actual.double() - right.value).abs()
    return float(torch.where(error == 0, 0.0, error / right.allowed).max())


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, 2, dtype=dtype, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("length", [2, 3, 4, 5, 7, 11, 12, 13, 16, 17])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_results_and_gradients_in_float32_are_within_the_bound_of_those_in_float64(name: str, length: int) -> None:
    x = drawn(5, length)
    exact = run(TRANSFORMS[name], x.double())

    for right, wide in zip(bounds(TRANSFORMS[name], x), exact, strict=True):
        assert margin(right, wide) < 1
        assert right.allowed.max() < 1e-3 * right.value.abs().max()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_largest_effect_of_an_error_of_the_operand_is_within_the_bound_and_near_it(name: str) -> None:
    """Each element is off by 0.1, with the sign that moves an element of the result furthest."""
    x, mode = drawn(3, 4, dtype=torch.float64), RunningError(arithmetic_of("float64"), ranks=2)
    off = mode.exactly(x)
    off.error.fill_(0.1)
    with mode:
        found = TRANSFORMS[name](off)
    right = mode.bounded(found)
    slopes = torch.autograd.functional.jacobian(TRANSFORMS[name], x).reshape(-1, *x.shape)
    margins = [margin(right, TRANSFORMS[name](x + 0.1 * slope.sign())) for slope in slopes]

    assert 0.4 < max(margins) <= 1


def test_copy_of_complex_numbers_rounds_nothing() -> None:
    x, mode = drawn(3, 4), RunningError(arithmetic_of("float32"), ranks=1)
    exact = mode.exactly(x)
    with mode:
        source = torch.view_as_complex(exact)
        copied = torch.view_as_real(torch.empty_like(source).copy_(source))
        spread = torch.view_as_real(torch.ops.aten.copy(source, source[:1]))
    assert isinstance(copied, Ranged) and isinstance(spread, Ranged)

    assert not copied.error.any() and copied.value.equal(x)
    assert spread.value.equal(x[:1].expand(3, 4, 2))


def test_copy_of_complex_numbers_into_real_ones_has_no_bound() -> None:
    mode = RunningError(arithmetic_of("float32"), ranks=1)
    exact = mode.exactly(drawn(3, 4))
    with mode, pytest.raises(InexactData, match="no bound is known for copy_ of complex numbers"):
        torch.empty_like(exact[..., 0]).copy_(torch.view_as_complex(exact))


def test_transform_along_no_dims_rounds_nothing() -> None:
    x, mode = drawn(3, 4), RunningError(arithmetic_of("float32"), ranks=1)
    exact = mode.exactly(x)
    with mode:
        found = torch.view_as_real(torch.fft.fftn(torch.view_as_complex(exact), dim=()))
    assert isinstance(found, Ranged)

    assert found.value.equal(x) and not found.error.any()


def test_transform_of_a_constant_is_a_constant() -> None:
    with RunningError(arithmetic_of("float32"), ranks=1):
        found = torch.fft.rfft(torch.full((4,), 0.5))

    assert isinstance(found, Ranged) and found.origin.is_constant


def test_padding_of_complex_numbers_has_a_complex_value() -> None:
    x = drawn(2, 3)
    right, _ = bounds(lambda x: torch.view_as_real(torch.constant_pad_nd(torch.view_as_complex(x), [1, 0], 1 + 2j)), x)

    assert right.value[:, 0].tolist() == [[1.0, 2.0], [1.0, 2.0]]
    assert right.value[:, 1:].equal(x.double())


@pytest.mark.parametrize("length", [2, 3, 8, 13, 27, 31, 32])
def test_a_plain_sum_of_products_is_within_the_bound(length: int) -> None:
    x = drawn(5, length)
    turns = torch.outer(torch.arange(length), torch.arange(length)) * (-2 * math.pi / length)
    summed = torch.view_as_real(torch.view_as_complex(x) @ torch.polar(torch.ones_like(turns), turns))

    assert 0 < margin(bounds(TRANSFORMS["forward"], x)[0], summed) < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "wrong", [of_pairs("fft", dim=0), of_pairs("ifft", dim=1), of_pairs("fft", dim=1, norm="ortho")]
)
def test_another_transform_is_not_within_the_bound(wrong: Transform, dtype: torch.dtype) -> None:
    x = drawn(5, 4, dtype=dtype)
    right, gradient = bounds(TRANSFORMS["forward"], x)

    assert margin(right, run(wrong, x)[0]) > 100
    assert margin(gradient, run(wrong, x)[1]) > 100


def test_long_transform_has_no_bound() -> None:
    with pytest.raises(InexactData, match="no bound is known for a Fourier transform of more than 32 elements"):
        bounds(TRANSFORMS["forward"], drawn(2, 33))
