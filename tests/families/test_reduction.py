"""Reductions and softmaxes: the case, its values, and the bounds beside torch's own kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from equivtest.cases.values import draw
from equivtest.families.reduction.case import OPS, SOFTMAXES, ReductionCase
from equivtest.layout import Layout, Replicate, Shard
from equivtest.oracle import expect
from equivtest.oracle.collectives import expected_collectives
from equivtest.oracle.reductions import log_softmax, log_softmax_grad, mean, norm, norm_grad, softmax, softmax_grad
from equivtest.oracle.rounding import TORCH_CPU
from equivtest.tensors import DTYPES
from equivtest.verdicts.elements import is_too_wide
from equivtest.verdicts.judging import one_thread
from tests.drawing import run_of
from tests.families.refusing import refuses
from tests.unsharded import errors_beside

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_op = pytest.mark.parametrize("op", OPS)


def case_of(**fields: Any) -> ReductionCase:
    """Seven rows on three ranks: 3, 3 and 1."""
    return ReductionCase(**{"world_size": 3, "shape": (7, 4), "layout": "shard(0)", **fields})


test_what_is_no_reduction_is_named = refuses(
    case_of,
    ({"shape": (7, 0)}, r"shape must have 1 to 4 dims of at least 1, got \(7, 0\)"),
    ({"dims": (1, 0)}, r"dims must be some of the 2 dims, ascending, got \(1, 0\)"),
    ({"dims": ()}, r"dims must be some of the 2 dims, ascending, got \(\)"),
    ({"op": "softmax", "dims": (0, 1)}, r"softmax takes one dim, got \(0, 1\)"),
    ({"op": "softmax", "keepdim": True}, "softmax keeps its dim: leave keepdim at False"),
    ({"layout": "partial(max)"}, r"layout must be replicate, shard\(DIM\) or partial\(sum\), got 'partial\(max\)'"),
    ({"layout": "partial(sum)", "values": (("real", 0),)}, "operands of a partial sum must be dense"),
    ({"requires_grad": ("y",)}, r"requires_grad must be one of \(\), \('x',\), got \('y',\)"),
)


@pytest.mark.parametrize(
    ("fields", "shape"),
    [({}, (4,)), ({"keepdim": True}, (1, 4)), ({"dims": (0, 1)}, ()), ({"op": "softmax"}, (7, 4))],
)
def test_reduced_dims_are_gone_or_of_size_one(fields: dict[str, Any], shape: tuple[int, ...]) -> None:
    case = case_of(**fields)

    assert case.shapes()["output"] == shape == expect(case, 0).tensors["output"].value.shape
    assert case.layouts()["output"] == Layout((Replicate(),)) and case.layouts()["grad.x"] == Layout((Shard(0),))


def test_a_partial_sum_is_the_sum_of_its_operands_and_its_gradient_is_whole() -> None:
    case = case_of(layout="partial(sum)", dims=(1,))
    given, expected = draw(case, 0), expect(case, 0).tensors

    assert given["x"].shape == (3, 7, 4) and case.layouts()["x"] == Layout((Shard(0),))
    assert torch.equal(expected["output"].value, given["x"].double().sum((0, 2)))
    assert expected["grad.x"].layout == Layout((Replicate(),)) and expected["grad.x"].value.shape == (7, 4)


@each_dtype
def test_sums_of_dense_values_are_exact_as_long_as_the_dtype_has_the_integers(dtype: str) -> None:
    short, long = case_of(dtype=dtype), case_of(dtype=dtype, shape=(300, 1), world_size=1, dims=(0,))

    assert expect(short, 0).tensors["output"].allowed is None
    assert (expect(long, 0).tensors["output"].allowed is None) == (dtype != "bfloat16")


def test_the_cotangent_of_a_largest_element_is_shared_by_all_that_are_as_large() -> None:
    case = case_of(op="amax", shape=(2,), values=(("dense", 9),), world_size=2)
    given, gradient = draw(case, 0), expect(case, 0).tensors["grad.x"]

    assert given["x"][0] == given["x"][1]
    assert gradient.value.tolist() == [float(given["cotangent"]) / 2] * 2
    assert gradient.allowed is not None and not gradient.allowed.any()


# ------------------------------------------------------------------------------------------------
# The bounds


@pytest.mark.parametrize("op", [op for op in OPS if op not in ("sum", "amax")])
def test_each_operation_has_an_error_near_its_bound_in_16_bits(op: str) -> None:
    cases = [case for case in run_of("reduction") if case.op == op and case.dtype in ("bfloat16", "float16")]
    with one_thread():
        errors = [errors_beside(case, index) for case in cases for index in range(len(case.values))]

    assert len(errors) > 25 and 0.4 < max(error for each in errors for error in each.values()) <= 1


def rows(dtype: str, *shape: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=source, dtype=torch.float64).to(DTYPES[dtype]).double()


@each_dtype
def test_a_mean_of_means_of_unequal_parts_is_beyond_the_bound(dtype: str) -> None:
    """In at least seven of eight rows, since a mean may be right by chance."""
    x = rows(dtype, 8, 7)
    bound = mean(x, TORCH_CPU[dtype], ranks=3)
    wrong = torch.stack([part.mean(1) for part in x.chunk(3, 1)]).mean(0)

    assert int(((wrong - bound.value).abs() > bound.allowed).sum()) >= 7


@each_dtype
def test_a_sum_of_norms_is_beyond_the_bound_and_the_norm_of_norms_within(dtype: str) -> None:
    x = rows(dtype, 8, 7)
    bound = norm(x, TORCH_CPU[dtype], ranks=3)
    norms = torch.stack([part.to(DTYPES[dtype]).norm(dim=1) for part in x.chunk(3, 1)])
    right = (norms**2).sum(0) ** 0.5

    assert bool(((norms.double().sum(0) - bound.value).abs() > bound.allowed).all())
    assert bool(((right.double() - bound.value).abs() <= bound.allowed).all())


@each_dtype
def test_a_softmax_of_parts_and_a_gradient_without_the_sum_are_beyond_the_bound(dtype: str) -> None:
    x, cotangent = rows(dtype, 8, 6), rows(dtype, 8, 6)
    bound, of_gradient = softmax(x, TORCH_CPU[dtype]), log_softmax_grad(x, cotangent, TORCH_CPU[dtype])
    parts = torch.cat([part.softmax(1) for part in x.chunk(2, 1)], 1)

    assert bool(((parts - bound.value).abs() > bound.allowed).all())
    assert bool(((cotangent - of_gradient.value).abs() > of_gradient.allowed).any())


@each_dtype
def test_bound_of_a_log_softmax_ignores_the_common_part_of_logits(dtype: str) -> None:
    x = rows(dtype, 8, 6)
    near, far = (log_softmax(each, TORCH_CPU[dtype]) for each in (x, x + 256))

    assert torch.allclose(far.allowed, near.allowed, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_log_softmax_that_stores_maximum_and_logarithm_together_is_beyond_the_bound(dtype: str) -> None:
    """The order of subtractions that torch gave up: pytorch issue 11752."""
    x = rows(dtype, 8, 6) + 256
    bound, peak = log_softmax(x, TORCH_CPU[dtype]), x.amax(1, keepdim=True)
    together = peak + (x - peak).exp().sum(1, keepdim=True).log()
    wrong = x - together.to(DTYPES[dtype]).double()

    assert bool(((wrong - bound.value).abs() > bound.allowed).any())


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_terms_of_sums_and_means_rather_add_up_than_cancel(op: str) -> None:
    values = tuple((mode, seed) for seed in range(32) for mode in ("dense", "real"))
    for size in (2, 6, 12):
        case = ReductionCase(world_size=4, dtype="bfloat16", op=op, shape=(size,), layout="shard(0)", values=values)
        wide = [is_too_wide(expect(case, index).tensors["output"]) for index in range(len(values))]
        assert sum(wide) <= 3


def test_gradient_of_a_norm_may_lose_an_underflow() -> None:
    x = torch.full((1, 700), 1.4, dtype=torch.float16)
    x[0, ::7] = torch.arange(1, 101) * 2.0**-20
    cotangent = torch.full((1, 1), 960.0, dtype=torch.float16)
    norm_of = torch.linalg.vector_norm(x.requires_grad_(), 2, 1, keepdim=True)
    norm_of.backward(cotangent)
    bound = norm_grad(x.detach().double(), cotangent.double(), TORCH_CPU["float16"], ranks=1)

    assert x.grad is not None
    assert bool(((x.grad.double() - bound.value).abs() <= bound.allowed).all())


def test_gradient_of_a_softmax_may_lose_an_underflow() -> None:
    x = torch.linspace(-76.5, -75.5, 33).repeat(2, 1)
    x[:, 0] = 0.0
    cotangent = torch.zeros_like(x)
    cotangent[:, 0] = 6e-11
    torch.softmax(x.requires_grad_(), 1).backward(cotangent)
    bound = softmax_grad(x.detach().double(), cotangent.double(), TORCH_CPU["float32"])

    assert x.grad is not None
    assert bool(((x.grad.double() - bound.value).abs() <= bound.allowed).all())
    assert float(x.grad[0, -1]) != 0


def test_a_softmax_takes_any_one_dim() -> None:
    for op in SOFTMAXES:
        case = case_of(op=op, dims=(1,), values=(("real", 0),))
        x = draw(case, 0)["x"].double()
        assert torch.allclose(expect(case, 0).tensors["output"].value, getattr(torch, op)(x, 1), rtol=1e-12)


# ------------------------------------------------------------------------------------------------
# Collectives


def documented(**fields: Any) -> list[str]:
    return [str(call) for call in expected_collectives(case_of(**fields), 0)]


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({}, ["forward all_reduce of 16 bytes"]),
        ({"dims": (1,)}, ["forward all_gather of 12 bytes"]),
        ({"dims": (1,), "keepdim": True}, ["forward all_gather of 12 bytes"]),
        ({"op": "mean"}, ["forward all_gather of 48 bytes"]),
        ({"op": "mean", "shape": (6, 4)}, ["forward all_reduce of 16 bytes"]),
        ({"op": "softmax"}, ["forward all_gather of 48 bytes"]),
        ({"op": "softmax", "dims": (1,)}, ["forward all_gather of 48 bytes"]),
        ({"layout": "partial(sum)"}, ["forward all_reduce of 16 bytes"]),
        ({"layout": "partial(sum)", "op": "mean", "requires_grad": ()}, ["forward all_reduce of 112 bytes"]),
        ({"layout": "replicate"}, []),
        ({"world_size": 1}, []),
        ({"op": "norm"}, ["forward all_reduce of 16 bytes", *["backward all_reduce of 16 bytes"] * 2]),
        (
            {"op": "amax"},
            ["forward all_reduce of 16 bytes", "backward all_reduce of 16 bytes", "backward all_reduce of 32 bytes"],
        ),
        (
            {"op": "amax", "layout": "partial(sum)"},
            ["forward all_reduce of 112 bytes", "backward all_reduce of 112 bytes"],
        ),
    ],
)
def test_results_are_reduced_if_that_is_enough_and_else_operands_are_gathered(
    fields: dict[str, Any], calls: list[str]
) -> None:
    """Seven rows of four numbers of four bytes, three rows on the largest rank; counts have eight bytes."""
    assert documented(**fields) == calls
