"""Real values of linear layers: equal everywhere, never zero, cancelling by mode, and their bounds."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from equivtest.cases.values import draw
from equivtest.cases.values.integers import generator
from equivtest.cases.values.real import nearly_normal
from equivtest.families.linear.case import REAL_MODES, LinearCase
from equivtest.families.linear.oracle.real import partial_magnitudes
from equivtest.families.linear.values.real import pairs_of
from equivtest.oracle import expect
from equivtest.tensors import DTYPES, same_bits
from equivtest.verdicts.elements import is_too_wide

each_mode = pytest.mark.parametrize("mode", REAL_MODES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_style = pytest.mark.parametrize("style", ["colwise", "rowwise"])


def case_of(mode: str, dtype: str = "float32", style: str = "rowwise", **fields: object) -> LinearCase:
    fields = {"world_size": 3, "leading": (4, 3), "in_features": 13, "out_features": 7, **fields}
    flags = ("x", "weight", "bias")
    return LinearCase(style=style, dtype=dtype, bias=True, requires_grad=flags, values=((mode, 3),), **fields)


def magnitudes(case: LinearCase) -> torch.Tensor:
    """|x||W|, (T, N)."""
    given = draw(case, 0)
    return given["x"].double().abs().reshape(-1, case.in_features) @ given["weight"].double().abs().T


def test_nearly_normal_numbers_have_fixed_bits_on_every_machine() -> None:
    found = nearly_normal((1000,), generator("real", 0, "x"))

    assert hashlib.sha256(found.numpy().tobytes()).hexdigest()[:16] == "572bdafd97d4644b"
    assert abs(float(found.mean())) < 0.1 and abs(float(found.var()) - 1) < 0.1 and bool((found != 0).all())


@each_mode
@each_dtype
def test_every_real_value_is_finite_and_nonzero(mode: str, dtype: str) -> None:
    for name, tensor in draw(case_of(mode, dtype), 0).items():
        assert bool(((tensor != 0) & tensor.isfinite()).all()), name


@each_mode
def test_values_depend_only_on_mode_and_seed(mode: str) -> None:
    case = case_of(mode)
    other = replace(case, values=((mode, 4),))

    assert same_bits(draw(case, 0)["x"], draw(replace(case, bias=False, requires_grad=()), 0)["x"])
    assert not same_bits(draw(case, 0)["x"], draw(other, 0)["x"])


@each_mode
def test_real_values_use_the_whole_significand(mode: str) -> None:
    """Some are odd multiples of their last place: fewer bits would not hold them."""
    bits = draw(case_of(mode), 0)["weight"].view(torch.int32)

    assert bool((bits & 1).any())


@each_style
@each_dtype
def test_outputs_of_cancelling_values_are_far_smaller_than_their_terms(dtype: str, style: str) -> None:
    """By 4 bits in bfloat16, 20 in float64; plain real values only by chance."""
    sizes = {}
    for mode in REAL_MODES:
        case = case_of(mode, dtype, style, in_features=12, world_size=2)
        expected = expect(replace(case, bias=False, requires_grad=()), 0).tensors["output"]
        sizes[mode] = float(expected.value.square().mean().sqrt() / magnitudes(case).mean())
    bits = {"float64": 20, "float32": 10, "float16": 6, "bfloat16": 4}[dtype]

    assert sizes["real-cancelling"] < 2.0 ** (2 - bits)
    assert sizes["real"] > 0.1


@each_style
@each_dtype
def test_every_feature_is_in_exactly_one_cancelling_pair_or_alone(dtype: str, style: str) -> None:
    for features in (1, 2, 3, 8, 13):
        pairs, alone = pairs_of(case_of("real-cancelling", dtype, style, in_features=features))
        assert sorted([*alone, *(feature for pair in pairs for feature in pair)]) == list(range(features))


def test_cancelling_pairs_of_a_16_bit_dtype_lie_on_one_rank() -> None:
    """Five features over three ranks: 0 and 1, 2 and 3, and 4 alone."""
    assert pairs_of(case_of("real-cancelling", "bfloat16", in_features=5)) == ([(0, 1), (2, 3)], [4])
    assert pairs_of(case_of("real-cancelling", "float32", in_features=5)) == ([(0, 2), (1, 3)], [4])


@each_mode
@each_style
def test_linear_reference_agrees_with_exact_fractions(mode: str, style: str) -> None:
    """Within its own share of the allowance, (n + 16) 2**-53 of the magnitudes."""
    case = case_of(mode, "float64", style)
    given, expected = draw(case, 0), expect(case, 0).tensors
    x, weight = given["x"].reshape(-1, case.in_features), given["weight"]
    row, column = 5, 2
    exact = sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(x[row], weight[column], strict=True))
    exact += Fraction(float(given["bias"][column]))
    output = expected["output"]
    found, allowed = (t.reshape(-1, case.out_features)[row, column] for t in (output.value, output.allowed))

    assert abs(Fraction(float(found)) - exact) <= Fraction(float(allowed))


@each_mode
@each_style
@each_dtype
def test_right_values_rounded_once_are_within_their_bound(mode: str, style: str, dtype: str) -> None:
    for name, tensor in expect(case_of(mode, dtype, style), 0).tensors.items():
        error = (tensor.value.to(DTYPES[dtype]).double() - tensor.value).abs()
        assert tensor.allowed is None or bool((error <= tensor.allowed).all()), name


@each_mode
@each_style
@each_dtype
def test_bounds_of_a_linear_layer_are_narrow_enough_to_conclude(mode: str, style: str, dtype: str) -> None:
    for name, tensor in expect(case_of(mode, dtype, style), 0).tensors.items():
        assert not is_too_wide(tensor), name


@each_mode
@each_dtype
def test_doubled_term_exceeds_the_bound_of_the_output_in_nearly_every_element(mode: str, dtype: str) -> None:
    case = case_of(mode, dtype, "colwise")
    given, output = draw(case, 0), expect(case, 0).tensors["output"]
    doubled = given["x"].double()[..., :1] * given["weight"].double()[:, 0]

    assert output.allowed is not None
    assert (doubled.abs() > output.allowed).double().mean() > 0.9


def test_unchanged_parameters_must_be_exactly_equal_on_real_values() -> None:
    expected = expect(case_of("real"), 0)

    assert [expected.tensors[f"param.{name}"].allowed for name in ("weight", "bias")] == [None, None]
    assert list(expected.tensors) == list(case_of("real").answer_names())


def test_bound_counts_reductions_only_if_ranks_share_the_contraction() -> None:
    expected = expect(case_of("real", "bfloat16"), 0).tensors

    assert "2 of bfloat16 on 3 ranks' sums" in expected["output"].derivation
    assert "ranks" not in expected["grad.x"].derivation


def test_partial_magnitudes_are_the_sum_of_the_ranks_absolute_sums() -> None:
    """1 - 1 on the first of two ranks, 2 on the second."""
    left, right = torch.tensor([[1.0, -1.0, 2.0]]), torch.ones(3, 1)

    assert partial_magnitudes(left, right, 2).tolist() == [[2.0]]
    assert partial_magnitudes(left, right, 3).tolist() == [[4.0]]
