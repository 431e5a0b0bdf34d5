"""Clipping by the norm over all parameters: its oracle, torch's own, and our ZeRO-3's."""

from __future__ import annotations

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed as dist

from equivtest.families.training.oracle.clipping import clipped, total_norm
from equivtest.families.training.zero3.subject.clipping import global_norm, scale
from equivtest.oracle.operations import Found, Operations
from equivtest.oracle.rounding import TORCH_CPU
from equivtest.tensors import DTYPES

REAL = {dtype: Operations(dtype, 1, must_be_exact=False, may_be_exact=False) for dtype in DTYPES}
WHOLE = {dtype: Operations(dtype, 1, must_be_exact=False) for dtype in DTYPES}
SHAPES = ((5, 3), (7,), (1, 1))
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def gradients_of(dtype: str, seed: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=source).to(DTYPES[dtype]) for shape in SHAPES]


def norm_of(gradients: list[torch.Tensor], norm_type: str, dtype: str, axes: tuple[int, ...] = ()) -> Found:
    return total_norm([gradient.double() for gradient in gradients], norm_type, axes, REAL[dtype])


def is_within(actual: torch.Tensor, found: Found) -> bool:
    allowed = 0.0 if found.allowed is None else found.allowed
    return bool(((actual.double() - found.value).abs() <= allowed).all())


def by_parts(gradients: list[torch.Tensor], p: float, axes: tuple[int, ...]) -> torch.Tensor:
    """Norms of the ranks' shares, powers added rank by rank and their root stored, axis after axis; then of tensors."""
    norms = []
    for gradient in gradients:
        shares = [torch.linalg.vector_norm(share, p) for share in gradient.reshape(-1).chunk(math.prod(axes))]
        for size in axes:
            groups = [shares[start : start + size] for start in range(0, len(shares), size)]
            shares = [sum((share**p for share in group), torch.zeros_like(group[0])) ** (1 / p) for group in groups]
        norms.append(torch.linalg.vector_norm(torch.stack(shares), p))
    return torch.linalg.vector_norm(torch.stack(norms), p)


# ------------------------------------------------------------------------------------------------
# the norm


def test_total_norm_of_3_and_4_depends_on_the_norm_type() -> None:
    gradients = [torch.tensor([[3.0]]), torch.tensor([-4.0, 0.0])]

    norms = {p: float(norm_of(gradients, p, "float32").value) for p in ("1", "2", "inf")}
    assert norms == {"1": 7.0, "2": 5.0, "inf": 4.0}


def test_total_norm_is_exact_for_norm_type_inf_and_for_short_sums_of_norm_type_1() -> None:
    gradients = [torch.tensor([96.0, -32.0]).double(), torch.tensor([64.0]).double()]

    assert total_norm(gradients, "inf", (4,), WHOLE["bfloat16"]).allowed is None
    assert total_norm(gradients, "1", (4,), WHOLE["bfloat16"]).allowed is None
    assert total_norm(gradients, "2", (4,), WHOLE["bfloat16"]).allowed is not None


def test_total_norm_whose_sum_has_too_many_bits_is_judged_within_a_bound() -> None:
    assert total_norm([torch.tensor([256.0, 1.0]).double()], "1", (), WHOLE["bfloat16"]).allowed is not None


@each_dtype
@pytest.mark.parametrize("norm_type", ["1", "2", "inf"])
def test_torchs_norm_of_whole_gradients_is_within_the_bound(dtype: str, norm_type: str) -> None:
    for seed in range(30):
        gradients = gradients_of(dtype, seed)
        for foreach in (False, True):
            actual = torch.nn.utils.get_total_norm(gradients, float(norm_type), foreach=foreach)
            assert is_within(actual, norm_of(gradients, norm_type, dtype))


@each_dtype
@pytest.mark.parametrize("axes", [(2,), (3,), (2, 2), (2, 3)])
@pytest.mark.parametrize("norm_type", ["1", "2"])
def test_norm_of_the_ranks_norms_is_within_the_bound(dtype: str, axes: tuple[int, ...], norm_type: str) -> None:
    for seed in range(10):
        gradients = gradients_of(dtype, seed)
        assert is_within(by_parts(gradients, float(norm_type), axes), norm_of(gradients, norm_type, dtype, axes))


@each_dtype
def test_bound_of_the_total_norm_is_a_few_roundings_wide(dtype: str) -> None:
    found = norm_of(gradients_of(dtype, 0), "2", dtype, (2, 2))
    eps = float(torch.finfo(DTYPES[dtype]).eps)

    assert found.allowed is not None
    assert eps / 2 < float(found.allowed / found.value) < 60 * eps


@each_dtype
def test_norm_of_one_ranks_gradients_is_beyond_the_bound_of_the_total_norm(dtype: str) -> None:
    gradients = gradients_of(dtype, 1)
    local = torch.nn.utils.get_total_norm([gradient.chunk(2)[0] for gradient in gradients])

    assert not is_within(local, norm_of(gradients, "2", dtype, (2, 2)))


def test_total_norm_is_judged_although_squares_of_the_ranks_norms_overflow_float16() -> None:
    gradients = [torch.full((2,), 300.0, dtype=torch.float16)]
    found = norm_of(gradients, "2", "float16", (2,))

    assert not is_within(by_parts(gradients, 2.0, (2,)), found)
    assert is_within(torch.nn.utils.get_total_norm(gradients), found)


def test_total_norm_that_overflows_has_an_infinite_bound() -> None:
    assert norm_of([torch.full((9,), 6e4, dtype=torch.float16)], "2", "float16").allowed == math.inf


def test_total_norm_of_enormous_or_zero_gradients_is_finite() -> None:
    assert float(norm_of([torch.full((4,), 1e300, dtype=torch.float64)], "2", "float64").value) == 2e300
    assert float(norm_of([torch.zeros(4)], "2", "float32").value) == 0.0


# ------------------------------------------------------------------------------------------------
# the clipped gradients


@each_dtype
@pytest.mark.parametrize("max_norm", [0.01, 0.5, 1.0, 4.0])
def test_clipped_gradient_is_within_the_bound_of_its_norm(dtype: str, max_norm: float) -> None:
    for seed in range(20):
        parameter = torch.nn.Parameter(torch.zeros(8, dtype=DTYPES[dtype]))
        gradient = torch.randn(8, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])
        parameter.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_([parameter], max_norm)
        found = clipped(gradient.double(), norm.double(), max_norm, TORCH_CPU[dtype])
        assert is_within(parameter.grad, found)


def test_clipped_gradient_is_multiplied_by_max_norm_over_total_norm_plus_1e_minus_6() -> None:
    found = clipped(torch.tensor([3.0, -4.0]).double(), torch.tensor(5.0).double(), 1.0, TORCH_CPU["float32"])
    factor = Fraction(1) / (Fraction(5) + Fraction(1, 10**6))

    assert found.allowed is not None
    assert [float(value) for value in found.value] == pytest.approx([float(3 * factor), float(-4 * factor)], rel=1e-15)
    assert float((found.allowed / found.value.abs()).max()) < 12 * 2.0**-24


@each_dtype
def test_gradient_below_the_clipping_limit_must_stay_exactly_unchanged(dtype: str) -> None:
    gradient = torch.tensor([3.0, -4.0]).double()
    found = clipped(gradient, torch.tensor(5.0).double(), 6.0, TORCH_CPU[dtype])

    assert found.allowed is None
    assert torch.equal(found.value, gradient)


def test_clipped_zeros_stay_exact_zeros() -> None:
    found = clipped(torch.zeros(3).double(), torch.tensor(5.0).double(), 1.0, TORCH_CPU["float16"])

    assert found.allowed is not None and not found.allowed.any()


def test_gradient_clipped_by_the_squared_norm_is_beyond_the_bound() -> None:
    gradient = torch.tensor([3.0, -4.0]).double()
    found = clipped(gradient, torch.tensor(5.0).double(), 1.0, TORCH_CPU["bfloat16"])

    assert not is_within(gradient / 25, found)


# ------------------------------------------------------------------------------------------------
# our own ZeRO-3, on one rank, with contributions of others


def global_norm_with(other: float, gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Returns this rank's norm if the others contribute `other`."""
    mesh: Any = SimpleNamespace(get_group=lambda: None)

    def reduce(total: torch.Tensor, op: Any = dist.ReduceOp.SUM, *, group: object) -> None:
        total.copy_(torch.maximum(total, torch.tensor(other)) if op == dist.ReduceOp.MAX else total + other)

    with patch.object(dist, "all_reduce", reduce):
        return global_norm(gradients, norm_type, mesh)


@pytest.mark.parametrize(
    ("norm_type", "other", "right"), [(1.0, 7.0, 14.0), (2.0, 144.0, 13.0), (math.inf, 12.0, 12.0)]
)
def test_zero3_combines_the_norms_of_the_ranks_by_the_norm_type(norm_type: float, other: float, right: float) -> None:
    gradients = [torch.tensor([3.0]), torch.tensor([-4.0]), torch.empty(0)]

    assert float(global_norm_with(other, gradients, norm_type)) == right


def test_rank_without_elements_adds_zero_to_the_norm() -> None:
    assert float(global_norm_with(5.0, [torch.empty(0)], math.inf)) == 5.0


def test_no_square_of_a_float16_number_overflows_in_zero3() -> None:
    assert float(global_norm_with(0.0, [torch.full((4,), 300.0, dtype=torch.float16)], 2.0)) == 600.0


def test_zero3_clips_gradients_in_place_and_never_enlarges_them() -> None:
    gradients = [torch.tensor([3.0, 4.0])]
    scale(gradients, torch.tensor(5.0), 10.0)
    assert gradients[0].tolist() == [3.0, 4.0]

    scale(gradients, torch.tensor(5.0), 2.5)
    assert gradients[0].tolist() == pytest.approx([1.5, 2.0], rel=1e-6)
