"""Element by element: shapes, values under every layout, indices, extents and patterns."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from equivtest.layout import Flat, Layout, Partial, Replicate, Shard
from equivtest.oracle.expected import ExpectedTensor
from equivtest.tensors import Placed, slice_local
from equivtest.verdicts.drawing import MOST_DRAWN
from equivtest.verdicts.elements import is_too_wide, judge_values, shape_mismatch, unravel
from equivtest.verdicts.patterns import pattern_of
from equivtest.verdicts.verdict import Mismatch

NAN = float("nan")
WHOLE = Layout((Replicate(),))
ROWS = Layout((Shard(0),))
COLUMNS = Layout((Shard(1),))
VALUE = torch.arange(1.0, 16.0, dtype=torch.float64).reshape(5, 3)  # 1 to 15, global
EXPECTED = ExpectedTensor(VALUE, None, ROWS, "float32", "equal: copied")


def placed(layout: Layout, world_size: int, value: torch.Tensor = VALUE) -> dict[int, Placed]:
    """Every rank's correct shard; padding is NaN."""
    mesh = (world_size,)
    locals_ = [slice_local(value, layout, mesh, rank, padding=NAN).float() for rank in range(world_size)]
    return {rank: Placed(local, layout, tuple(value.shape)) for rank, local in enumerate(locals_)}


def judge(answers: dict[int, Placed], expected: ExpectedTensor = EXPECTED) -> tuple[Mismatch | None, float]:
    return judge_values("w", expected, answers, (len(answers),))


def found(answers: dict[int, Placed], expected: ExpectedTensor = EXPECTED) -> Mismatch:
    mismatch, _ = judge(answers, expected)
    assert mismatch is not None
    return mismatch


def spoil(answers: dict[int, Placed], rank: int, index: tuple[int, ...], value: float) -> dict[int, Placed]:
    local = answers[rank].local.clone()
    local[index] = value
    return {**answers, rank: replace(answers[rank], local=local)}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    "layout",
    [WHOLE, ROWS, COLUMNS, *(Layout((Partial(op),)) for op in ("sum", "max", "min"))],
    ids=str,
)
def test_shards_of_the_expected_tensor_have_no_error(layout: Layout, world_size: int) -> None:
    """Even, uneven and empty shards, whole tensors and operands: no error, margin 0."""
    assert judge(placed(layout, world_size)) == (None, 0.0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_padding_is_not_judged(world_size: int) -> None:
    assert judge(placed(Layout((Flat(16),)), world_size)) == (None, 0.0)


def test_partial_avg_tensor_is_right_if_the_average_of_its_operands_is_right() -> None:
    layout = Layout((Partial("avg"),))
    locals_ = [VALUE.float() - 1, VALUE.float() + 1]

    assert judge({rank: Placed(local, layout) for rank, local in enumerate(locals_)}) == (None, 0.0)


@pytest.mark.parametrize(
    ("layout", "world_size", "rank", "local_index", "global_index"),
    [
        (ROWS, 3, 2, (0, 1), (4, 1)),
        (COLUMNS, 2, 1, (3, 0), (3, 2)),
        (WHOLE, 2, 1, (4, 2), (4, 2)),
        (Layout((Flat(16),)), 2, 1, (3,), (3, 2)),
        (Layout((Flat(16),)), 4, 3, (2,), (4, 2)),
        (Layout((Partial("sum"),)), 2, 0, (2, 1), (2, 1)),
    ],
    ids=str,
)
def test_mismatch_has_local_and_global_index_of_the_wrong_element(
    layout: Layout, world_size: int, rank: int, local_index: tuple[int, ...], global_index: tuple[int, ...]
) -> None:
    mismatch = found(spoil(placed(layout, world_size), rank, local_index, 99.0))

    assert (mismatch.rank, mismatch.local_index, mismatch.global_index) == (rank, local_index, global_index)
    assert mismatch.global_shape == (5, 3)
    assert float(mismatch.expected) == VALUE[global_index] and float(mismatch.actual) == 99


def test_partition_of_a_scalar_has_the_empty_global_index() -> None:
    """A 0-dim parameter lies in one rank's partition."""
    value = torch.tensor(3.0, dtype=torch.float64)
    expected = replace(EXPECTED, value=value)
    mismatch = found(spoil(placed(Layout((Flat(2),)), 2, value), 0, (0,), 4.0), expected)

    assert (mismatch.local_index, mismatch.global_index, mismatch.global_shape) == ((0,), (), ())


def test_partial_sum_with_one_operand_twice_is_a_mismatch_by_the_factor_2() -> None:
    answers = placed(Layout((Partial("sum"),)), 2)
    mismatch = found({**answers, 1: answers[0]})

    assert mismatch.pattern == "actual / expected = 2.000 at every wrong element"
    assert mismatch.extent == "15 of 15 elements of all ranks' operands, reduced"


def test_error_in_a_tensor_that_must_be_equal_has_an_infinite_margin() -> None:
    assert judge(spoil(placed(ROWS, 2), 0, (0, 0), 1.5))[1] == math.inf


@pytest.mark.parametrize(("error", "fails"), [(0.25, False), (0.5, False), (0.75, True)])
def test_margin_is_error_divided_by_allowed_error(error: float, *, fails: bool) -> None:
    expected = replace(EXPECTED, allowed=torch.full_like(VALUE, 0.5), derivation="half")
    mismatch, margin = judge(spoil(placed(ROWS, 2), 0, (0, 0), 1 + error), expected)

    assert ((mismatch is not None), margin) == (fails, error / 0.5)


@pytest.mark.parametrize("actual", [NAN, math.inf, 1e30])
def test_any_value_is_right_if_the_allowed_error_is_infinite(actual: float) -> None:
    allowed = torch.full_like(VALUE, 0.5)
    allowed[0, 0] = math.inf
    expected = replace(EXPECTED, allowed=allowed)
    answers = spoil(placed(ROWS, 2), 0, (0, 0), actual)

    assert judge(answers, expected) == (None, 0.0)
    assert found(spoil(answers, 1, (0, 1), NAN), expected).rank == 1


def test_infinity_is_right_if_infinity_is_expected() -> None:
    value = torch.full_like(VALUE, math.inf)
    expected = replace(EXPECTED, value=value)

    assert judge(placed(ROWS, 2, value), expected) == (None, 0.0)
    assert judge(placed(ROWS, 2), expected)[1] == math.inf


@pytest.mark.parametrize(("share", "wide"), [(0.09, False), (0.11, True), (math.inf, True), (NAN, True)])
def test_bound_is_too_wide_if_the_allowed_error_exceeds_a_tenth_of_the_values(share: float, *, wide: bool) -> None:
    value = torch.tensor([3.0, -3.0, 3.0], dtype=torch.float64)
    expected = replace(EXPECTED, value=value, allowed=torch.full_like(value, 3 * share))

    assert is_too_wide(expected) == wide


@pytest.mark.parametrize("allowed", [None, torch.zeros(0)], ids=["equality", "no elements"])
def test_bound_of_an_exact_or_empty_tensor_is_never_too_wide(allowed: torch.Tensor | None) -> None:
    assert not is_too_wide(replace(EXPECTED, allowed=allowed))


def test_mismatch_shows_the_element_with_the_largest_ratio_of_error_to_allowed_error() -> None:
    allowed = torch.full_like(VALUE, 8.0)
    allowed[4] = 0.5
    expected = replace(EXPECTED, allowed=allowed, derivation="as measured")
    mismatch = found(spoil(spoil(placed(ROWS, 2), 0, (0, 0), 17.0), 1, (1, 0), 16.0), expected)

    assert (mismatch.rank, mismatch.global_index) == (1, (4, 0))
    assert (mismatch.error, mismatch.allowed, mismatch.derivation) == (3.0, 0.5, "as measured")


def test_each_element_is_judged_by_its_own_allowed_error() -> None:
    allowed = torch.zeros_like(VALUE)
    allowed[4, 0] = 1.0
    expected = replace(EXPECTED, allowed=allowed)

    for layout, index in ((ROWS, (1, 0)), (Layout((Flat(16),)), (4,))):
        assert judge(spoil(placed(layout, 2), 1, index, 14.0), expected)[0] is None
        assert judge(spoil(placed(layout, 2), 1, (0,) * len(index), 14.0), expected)[0] is not None


def test_nan_in_place_of_an_expected_number_is_wrong() -> None:
    expected = replace(EXPECTED, allowed=torch.full_like(VALUE, 1e9))
    mismatch, margin = judge(spoil(placed(ROWS, 2), 0, (0, 0), NAN), expected)

    assert mismatch is not None and mismatch.actual == "nan" and margin == math.inf


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf, 0.0])
def test_nan_and_infinities_are_right_if_they_are_expected(value: float) -> None:
    special = VALUE.clone()
    special[0, 0] = value

    assert judge(placed(ROWS, 2, special), replace(EXPECTED, value=special)) == (None, 0.0)


@pytest.mark.parametrize(("expected", "actual"), [(NAN, 1.0), (math.inf, 1.0), (math.inf, -math.inf)])
def test_number_in_place_of_nan_or_infinity_is_wrong(expected: float, actual: float) -> None:
    special = VALUE.clone()
    special[0, 0] = expected
    answers = spoil(placed(ROWS, 2, special), 0, (0, 0), actual)

    assert judge(answers, replace(EXPECTED, value=special))[0] is not None


def test_signed_zeros_are_equal_by_value() -> None:
    """-0.0 for 0.0 is no error."""
    zeros = replace(EXPECTED, value=torch.zeros_like(VALUE))

    assert judge(placed(ROWS, 2, -torch.zeros_like(VALUE)), zeros) == (None, 0.0)


@pytest.mark.parametrize(
    ("world_size", "ranks", "words"),
    [
        (3, [2], "1 of 3 local elements; rank 2 only"),
        (3, [0, 2], "1 of 6 local elements; ranks 0, 2"),
        (3, [0, 1, 2], "1 of 6 local elements; on every rank"),
        (1, [0], "1 of 15 local elements; on the only rank"),
    ],
)
def test_message_counts_wrong_elements_and_names_their_ranks(world_size: int, ranks: list[int], words: str) -> None:
    answers = placed(ROWS, world_size)
    for rank in ranks:
        answers = spoil(answers, rank, (0, 0), 99.0)

    assert found(answers).extent == words


PLACES = {
    ROWS: [(0, 1, 2, 3, 4, 5, 6, 7, 8), (9, 10, 11, 12, 13, 14)],
    COLUMNS: [(0, 1, 3, 4, 6, 7, 9, 10, 12, 13), (2, 5, 8, 11, 14)],
    Layout((Flat(16),)): [tuple(range(8)), tuple(range(8, 15))],
    WHOLE: [tuple(range(15))] * 2,
}
"""Layout -> the elements that each of two ranks holds of VALUE."""


@pytest.mark.parametrize(("layout", "places"), PLACES.items(), ids=str)
def test_drawing_shows_the_elements_and_the_wrong_elements_of_each_rank(
    layout: Layout, places: list[tuple[int, ...]]
) -> None:
    answers = placed(layout, 2)
    drawing = found(spoil(answers, 1, (0,) * answers[1].local.dim(), NAN)).drawing

    assert drawing is not None and drawing.shape == (5, 3)
    assert [(held.rank, held.elements) for held in drawing.ranks] == list(enumerate(places))
    assert [held.wrong for held in drawing.ranks] == [(), (places[1][0],)]


def test_drawing_of_a_partial_tensor_shows_the_sum_of_its_operands() -> None:
    drawing = found(spoil(placed(Layout((Partial("sum"),)), 2), 1, (0, 1), NAN)).drawing

    assert drawing is not None
    assert [(held.rank, held.wrong) for held in drawing.ranks] == [(None, (1,))]


def test_large_tensor_has_no_drawing() -> None:
    value = torch.ones(MOST_DRAWN + 1, dtype=torch.float64)
    wrong = spoil(placed(WHOLE, 1, value), 0, (0,), NAN)

    assert found(wrong, ExpectedTensor(value, None, WHOLE, "float32", "equal: copied")).drawing is None


@pytest.mark.parametrize("layout", [Layout((Shard(2),)), Layout((Replicate(), Replicate())), Layout((Flat(4),))])
def test_impossible_layout_is_reported_as_a_shape_mismatch(layout: Layout) -> None:
    mismatch = shape_mismatch("w", EXPECTED, {0: Placed(VALUE.float(), layout)}, (1,))

    assert mismatch is not None and mismatch.actual.startswith(f"{layout}: ") and mismatch.expected == "shard(0)"


def test_shard_order_that_names_an_unsharded_axis_is_reported_as_a_shape_mismatch() -> None:
    layout = Layout((Shard(0),), shard_order=(1,))

    assert shape_mismatch("w", EXPECTED, {0: Placed(VALUE.float(), layout)}, (1,)) is not None


@pytest.mark.parametrize(
    ("change", "expected", "actual"),
    [
        ({"local": VALUE.float()[:2]}, "local (3, 3) float32", "local (2, 3) float32"),
        ({"local": VALUE[:3]}, "local (3, 3) float32", "local (3, 3) float64"),
        ({"global_shape": (6, 3)}, "global (5, 3)", "global (6, 3)"),
        ({"layout": WHOLE}, "local (5, 3) float32", "local (3, 3) float32"),
    ],
)
def test_wrong_shape_or_dtype_is_reported_as_a_mismatch(change: dict[str, object], expected: str, actual: str) -> None:
    answers = placed(ROWS, 2)
    mismatch = shape_mismatch("w", EXPECTED, {**answers, 0: replace(answers[0], **change)}, (2,))

    assert mismatch is not None and (mismatch.rank, mismatch.expected, mismatch.actual) == (0, expected, actual)


def test_missing_tensor_is_reported_as_a_mismatch() -> None:
    mismatch = shape_mismatch("w", EXPECTED, {**placed(ROWS, 2), 1: None}, (2,))

    assert mismatch is not None and (mismatch.rank, mismatch.actual) == (1, "none: the subject did not return it")


@pytest.mark.parametrize("name", ["grad.2.bias", "step2.grad.2.bias"])
def test_mismatch_of_a_missing_gradient_says_that_the_gradient_is_missing(name: str) -> None:
    mismatch = shape_mismatch(name, EXPECTED, {**placed(ROWS, 2), 1: None}, (2,))

    assert mismatch is not None
    assert mismatch.actual == "none: on this rank .grad of 2.bias is None after the backward"
    assert mismatch.way_out.startswith("the unsharded computation has a gradient: use 2.bias itself in the forward")


@pytest.mark.parametrize(
    ("name", "change", "way_out"),
    [
        ("output", {"layout": WHOLE}, "(3, 3) is this rank's part of (5, 3) divided along dim 0: gather it"),
        (
            "step2.grad.w",
            {"layout": WHOLE},
            "(3, 3) is this rank's part of (5, 3) divided along dim 0: gather it, or return a DTensor, which "
            "knows that it is a part",
        ),
        ("output", {"local": VALUE[:3]}, "return it in float32, as the unsharded computation does"),
        ("output", {"local": VALUE[:2].float()}, ""),
    ],
)
def test_mismatch_of_shape_or_dtype_says_what_to_do(name: str, change: dict[str, object], way_out: str) -> None:
    answers = placed(ROWS, 2)
    mismatch = shape_mismatch(name, EXPECTED, {**answers, 0: replace(answers[0], **change)}, (2,))

    assert mismatch is not None and mismatch.way_out == way_out


def test_tensor_without_a_stated_global_shape_passes_the_check_of_shapes() -> None:
    answers = {rank: replace(one, global_shape=None) for rank, one in placed(ROWS, 3).items()}

    assert shape_mismatch("w", EXPECTED, answers, (3,)) is None


@pytest.mark.parametrize("layouts", [(Layout((Partial(),)), ROWS), (ROWS, Layout((Partial(),)))], ids=str)
def test_tensor_that_only_some_ranks_call_partial_is_a_shape_mismatch(layouts: tuple[Layout, Layout]) -> None:
    answers = {rank: placed(layout, 2)[rank] for rank, layout in enumerate(layouts)}
    mismatch = shape_mismatch("w", EXPECTED, answers, (2,))

    assert mismatch is not None
    assert (mismatch.rank, mismatch.expected, mismatch.actual) == (1, f"{layouts[0]} as on rank 0", str(layouts[1]))


@pytest.mark.parametrize(
    ("actual", "expected", "pattern"),
    [
        ([NAN, NAN], [1.0, 2.0], "NaN at every wrong element"),
        ([0.0, 0.0], [1.0, 2.0], "zero at every wrong element"),
        ([2.0, 4.0], [1.0, 2.0], "actual / expected = 2.000 at every wrong element"),
        ([2.5, 3.5], [1.0, 2.0], "actual - expected = 1.5 at every wrong element"),
        ([2.0, 1.0], [1.0, 2.0], "the wrong elements hold the right values in another order"),
        ([2.0], [1.0], ""),
        ([2.0, 5.0], [1.0, 2.0], ""),
        ([0.0, 5.0], [1.0, 2.0], ""),
        ([NAN, 4.0], [1.0, 2.0], ""),
        ([1.0, 7.0], [0.0, 0.0], ""),
    ],
)
def test_pattern_is_reported_only_if_all_wrong_elements_fit_the_pattern(
    actual: list[float], expected: list[float], pattern: str
) -> None:
    parts = [[torch.tensor(each[part]) for each in (actual, expected)] for part in (slice(0, 1), slice(1, None))]

    assert pattern_of([(right, wrong, torch.zeros_like(right)) for right, wrong in parts]) == pattern


@pytest.mark.parametrize(
    ("actual", "allowed", "factor"),
    [
        ([2.00001, -3.99999, 1e-6], 1e-5, "2.000"),
        ([-1.000001, 1.999999, 1e-6], 1e-5, "-1.000"),
        ([2.00001, -3.99999, 1e-6], 1e-2, ""),
        ([2.00001, -3.99999, 1.0], 1e-5, ""),
        ([2.00001, 3.99999, 1e-6], 1e-5, ""),
        ([2.001, -3.99999, 1e-6], 1e-5, ""),
        ([1e-6, -2e-6, 1e-11], 1e-7, ""),
    ],
)
def test_factor_between_rounded_values_is_reported_only_if_bounds_make_it_certain(
    actual: list[float], allowed: float, factor: str
) -> None:
    """The third expected value is 0."""
    wrong = torch.tensor(actual).double(), torch.tensor([1.0, -2.0, 0.0]).double(), torch.full((3,), allowed).double()

    assert pattern_of([wrong]) == (f"actual / expected = {factor} at every wrong element" if factor else "")


def test_pattern_of_wrong_elements_is_reported_beside_right_elements() -> None:
    assert found(spoil(placed(ROWS, 2), 1, (0, 0), 0.0)).pattern == "zero at every wrong element"


@pytest.mark.parametrize(("flat", "shape", "index"), [(11, (5, 3), (3, 2)), (0, (), ()), (5, (2, 1, 3), (1, 0, 2))])
def test_unravel_counts_elements_row_by_row(flat: int, shape: tuple[int, ...], index: tuple[int, ...]) -> None:
    """Like torch.Tensor.view."""
    assert unravel(flat, shape) == index
