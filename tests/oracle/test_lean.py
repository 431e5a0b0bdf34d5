"""Errors that lean: a truncating accumulator is found, rounding to nearest never, and what is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from equivtest.cases.values import draw
from equivtest.families.linear.case import LinearCase
from equivtest.families.redistribute.case import RedistributeCase
from equivtest.layout import Layout, Partial, Replicate, Shard
from equivtest.oracle import expect
from equivtest.oracle.declared import declared
from equivtest.oracle.expected import ExpectedTensor
from equivtest.oracle.rounding import TORCH_CPU
from equivtest.tensors import DTYPES, Placed, slice_local
from equivtest.verdicts.claims import equals_unsharded
from equivtest.verdicts.lean import judge_lean
from tests.replies import answers_of, right_replies, set_tensor

CASE = LinearCase(
    world_size=2,
    style="colwise",
    leading=(64,),
    in_features=32,
    out_features=32,
    requires_grad=(),
    values=(("real", 0),),
)
ROWS = Layout((Shard(0),))
WHOLE = Layout((Replicate(),))


def truncated_products() -> torch.Tensor:
    """The output of CASE, every sum cut towards zero after each addition instead of rounded: float32, global."""
    given = draw(CASE, 0)
    x, weight = given["x"].double(), given["weight"].double()  # (T, K), (N, K)
    total = torch.zeros(64, 32)
    for feature in range(CASE.in_features):
        exact = total.double() + x[:, feature, None] * weight[None, :, feature]
        rounded = exact.float()
        too_large = rounded.double().abs() > exact.abs()
        total = torch.where(too_large, torch.nextafter(rounded, torch.zeros(())), rounded)
    return total


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expected_of(value: torch.Tensor, layout: Layout = ROWS, dtype: str = "bfloat16") -> ExpectedTensor:
    return ExpectedTensor(value, torch.full_like(value, 1.0), layout, dtype, "derived", is_symmetric=True)


def held(actual: torch.Tensor, layout: Layout, world_size: int) -> dict[int, Placed]:
    return {rank: Placed(slice_local(actual, layout, (world_size,), rank), layout) for rank in range(world_size)}


def test_truncating_accumulator_fails_although_each_error_is_within_its_bound() -> None:
    replies = right_replies(CASE)
    for rank in range(2):
        local = slice_local(truncated_products(), CASE.layouts()["output"], (2,), rank)
        replies = set_tensor(replies, rank, "output", local=local)
    judged = equals_unsharded.judge(CASE, expect(CASE, 0), answers_of(replies))

    assert (judged.kind, judged.mismatches[0].tensor) == ("value", "output")
    assert judged.margin < 1
    assert "root of the sum of their squares" in judged.mismatches[0].derivation


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", [ROWS, WHOLE], ids=str)
@pytest.mark.parametrize("shape", [(200, 7), (7, 200), (3, 4, 100), (400,)], ids=str)
def test_errors_of_rounding_to_nearest_do_not_lean_to_one_side(
    dtype: str, layout: Layout, shape: tuple[int, ...]
) -> None:
    """For any shape: 40 tensors, on three ranks."""
    for seed in range(40):
        value = normal(seed, *shape)
        answers = held(value.to(DTYPES[dtype]), layout, 3)
        assert judge_lean("output", expected_of(value, layout, dtype), answers, (3,)) is None


@pytest.mark.parametrize("layout", [ROWS, WHOLE], ids=str)
@pytest.mark.parametrize("world_size", [1, 3])
def test_one_sided_error_test_rejects_values_scaled_by_half_an_ulp(layout: Layout, world_size: int) -> None:
    """1 - 2**-9 in bfloat16: every element is within one ulp."""
    value = normal(0, 40, 30)
    answers = held((value * (1 - 2.0**-9)).bfloat16(), layout, world_size)
    mismatch = judge_lean("output", expected_of(value, layout), answers, (world_size,))

    assert mismatch is not None and "mostly on one side of zero" in mismatch.actual


def toward_zero(value: torch.Tensor) -> torch.Tensor:
    """bfloat16, cut instead of rounded."""
    rounded = value.bfloat16()
    too_large = rounded.double().abs() > value.abs()
    return torch.where(too_large, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)


def test_one_sided_error_test_rejects_truncated_values_of_mean_error_zero() -> None:
    """160 values from 2**-10 to 2**10, as many of either sign: no plain sum of errors shows anything."""
    value = normal(0, 160) * 2.0 ** torch.arange(160).remainder(21).sub(10)
    mismatch = judge_lean("output", expected_with(value), held(toward_zero(value), ROWS, 2), (2,))

    assert mismatch is not None and mismatch.extent == "160 errors of the whole tensor"
    assert judge_lean("output", expected_with(value), held(value.bfloat16(), ROWS, 2), (2,)) is None


def expected_with(value: torch.Tensor) -> ExpectedTensor:
    """An allowance in proportion to the value, as of a sum of few terms."""
    return replace(expected_of(value), allowed=value.abs() * 2.0**-7)


@pytest.mark.parametrize("num_operands", [2, 3])
def test_one_sided_error_test_accepts_rounded_sums_of_few_operands(num_operands: int) -> None:
    for seed in range(4):
        operands = normal(seed, num_operands, 100_000).bfloat16()
        total = operands.double().sum(0)
        added = operands[0]
        for operand in operands[1:]:
            added = added + operand
        assert judge_lean("output", expected_with(total), held(added, ROWS, 1), (1,)) is None


@pytest.mark.parametrize(
    ("op", "world_size", "symmetric"), [("sum", 2, True), ("sum", 3, True), ("avg", 4, True), ("avg", 3, False)]
)
def test_rounded_factor_or_truncation_makes_errors_of_a_reduction_asymmetric(
    op: str, world_size: int, *, symmetric: bool
) -> None:
    case = RedistributeCase(world_size=world_size, source=(f"partial({op})",), values=(("real", 0),))
    assert expect(case, 0).tensors["output"].is_symmetric == symmetric
    rounds_otherwise = {"float32": replace(TORCH_CPU["float32"], rounds_to_nearest=False)}
    with declared(rounds_otherwise):
        assert not expect(case, 0).tensors["output"].is_symmetric


def test_errors_that_lean_to_one_side_in_one_column_are_found() -> None:
    value = normal(0, 200, 30)
    actual = value.bfloat16()
    actual[:, 3] = torch.nextafter(actual[:, 3], torch.full((200,), torch.inf, dtype=torch.bfloat16))
    mismatch = judge_lean("output", expected_of(value), held(actual, ROWS, 2), (2,))

    assert mismatch is not None and "one column" in mismatch.extent


def test_errors_that_lean_to_one_side_in_one_shard_are_found_and_reported() -> None:
    value = normal(0, 90, 2)
    actual = value.bfloat16()
    actual[60:] = torch.nextafter(actual[60:], torch.full((30, 2), torch.inf, dtype=torch.bfloat16))
    spread = held(actual, ROWS, 3)
    mismatch = judge_lean("output", expected_of(value), spread, (3,))

    assert mismatch is None  # 60 errors cannot reach nine
    longer = normal(0, 300, 2)
    actual = longer.bfloat16()
    actual[200:] = torch.nextafter(actual[200:], torch.full((100, 2), torch.inf, dtype=torch.bfloat16))
    mismatch = judge_lean("output", expected_of(longer), held(actual, ROWS, 3), (3,))
    assert mismatch is not None and (mismatch.rank, mismatch.extent) == (2, "200 errors of rank 2's shard")


def test_one_sided_error_test_counts_errors_of_replicas_once() -> None:
    value = normal(0, 60)
    answers = held(value.bfloat16() * 1.5, WHOLE, 10)

    assert judge_lean("output", expected_of(value, WHOLE), answers, (10,)) is None


@pytest.mark.parametrize("shape", [(0,), (0, 3), (1,), (2, 1)], ids=str)
def test_one_sided_error_test_skips_a_tensor_of_no_or_few_elements(shape: tuple[int, ...]) -> None:
    value = torch.ones(shape, dtype=torch.float64)

    assert judge_lean("output", expected_of(value), held(value.bfloat16() * 2, ROWS, 4), (4,)) is None


def test_one_sided_error_test_accepts_a_tensor_without_errors() -> None:
    value = normal(0, 200).bfloat16().double()

    assert judge_lean("output", expected_of(value), held(value.bfloat16(), ROWS, 2), (2,)) is None


@pytest.mark.parametrize(
    ("change", "layout"),
    [({"is_symmetric": False}, ROWS), ({}, Layout((Partial("sum"),)))],
    ids=["undeclared", "partial"],
)
def test_one_sided_error_test_skips_a_tensor_with_rightly_one_sided_errors(
    change: dict[str, bool], layout: Layout
) -> None:
    value = normal(0, 200)
    expected = replace(expected_of(value, layout), **change)

    assert judge_lean("output", expected, held((value * 1.1).bfloat16(), layout, 2), (2,)) is None


def test_one_sided_error_test_skips_elements_that_may_overflow() -> None:
    value = normal(0, 200)
    expected = replace(expected_of(value), allowed=torch.full_like(value, torch.inf))

    assert judge_lean("output", expected, held(torch.full((200,), torch.inf), ROWS, 2), (2,)) is None


@pytest.mark.parametrize(
    ("world_size", "style", "bias", "symmetric"),
    [(3, "rowwise", True, False), (3, "rowwise", False, True), (4, "rowwise", True, True), (3, "colwise", True, True)],
)
def test_one_sided_error_test_skips_an_output_whose_rows_share_one_rounded_bias(
    world_size: int, style: str, *, bias: bool, symmetric: bool
) -> None:
    """DTensor divides a rowwise layer's bias by the world size, which rounds unless that is a power of two."""
    case = LinearCase(world_size=world_size, style=style, in_features=8, bias=bias, values=(("real", 0),))

    assert expect(case, 0).tensors["output"].is_symmetric == symmetric


def test_one_sided_error_test_skips_an_output_whose_bias_loses_a_bit_when_halved() -> None:
    """217 and -175 times float16's smallest number are odd: their halves are rounded, once for every token."""
    case = LinearCase(
        world_size=2, dtype="float16", style="rowwise", leading=(31, 2), in_features=8, out_features=3, bias=True,
        values=(("real-cancelling", 1),),
    )  # fmt: skip

    assert not expect(case, 0).tensors["output"].is_symmetric
    assert expect(replace(case, bias=False), 0).tensors["output"].is_symmetric


def test_errors_of_products_with_one_common_factor_lean_to_one_side() -> None:
    """Small significands are more frequent than large ones: 1 + 2**-7 rounds those down."""
    x = torch.linspace(1, 2, 400_000, dtype=torch.float64).square().sub(1).div(3).add(1).bfloat16()
    value = x.double() * (1 + 2.0**-7)

    assert judge_lean("output", expected_of(value), held(value.bfloat16(), ROWS, 1), (1,)) is not None


@pytest.mark.parametrize(
    ("name", "few"),
    [
        ("output", {"in_features": 7}),
        ("grad.x", {"out_features": 7}),
        ("grad.weight", {"leading": (7,)}),
        ("grad.bias", {"leading": (7,)}),
    ],
)
def test_one_sided_error_test_skips_a_tensor_of_sums_of_few_terms(name: str, few: dict[str, object]) -> None:
    sizes = {"leading": (8,), "in_features": 8, "out_features": 8}
    flags = ("x", "weight", "bias")
    for fields, symmetric in ((sizes, True), (sizes | few, False)):
        case = LinearCase(
            world_size=2, style="colwise", bias=True, requires_grad=flags, values=(("real", 0),), **fields
        )
        assert expect(case, 0).tensors[name].is_symmetric == symmetric
