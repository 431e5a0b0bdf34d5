"""Bounds of log_softmax beside torch's own kernels."""

from __future__ import annotations

import pytest
import torch

from equivtest.oracle.rounding import TORCH_CPU
from equivtest.oracle.softmaxes import log_softmax, log_softmax_grad
from equivtest.tensors import DTYPES

each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def rows(dtype: str, *shape: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=source, dtype=torch.float64).to(DTYPES[dtype]).double()


@each_dtype
def test_log_softmax_gradient_without_the_sum_is_beyond_the_bound(dtype: str) -> None:
    x, cotangent = rows(dtype, 8, 6), rows(dtype, 8, 6)
    bound = log_softmax_grad(x, cotangent, TORCH_CPU[dtype])

    assert bool(((cotangent - bound.value).abs() > bound.allowed).any())


@each_dtype
def test_bound_of_a_log_softmax_does_not_grow_if_all_logits_are_shifted(dtype: str) -> None:
    x = rows(dtype, 8, 6)
    near, far = (log_softmax(each, TORCH_CPU[dtype]) for each in (x, x + 256))

    assert torch.allclose(far.allowed, near.allowed, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_log_softmax_that_stores_maximum_and_logarithm_together_is_beyond_the_bound(dtype: str) -> None:
    """The order of subtractions that torch gave up: pytorch issue 11752."""
    x = rows(dtype, 8, 6) + 256
    bound, peak = log_softmax(x, TORCH_CPU[dtype]), x.amax(1, keepdim=True)
    together = peak + (x - peak).exp().sum(1, keepdim=True).log()
    wrong = x - together.to(DTYPES[dtype]).double()

    assert bool(((wrong - bound.value).abs() > bound.allowed).any())
