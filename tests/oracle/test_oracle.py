"""The oracle: right by a second opinion, sharp against mutants, and unable to raise a false alarm."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from equivtest.cases.case import Case
from equivtest.cases.values import draw
from equivtest.errors import Misuse
from equivtest.families.linear.case import LINEAR_MODES, LinearCase
from equivtest.families.linear.oracle import sum_linear
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.layout import Flat, Replicate
from equivtest.oracle import expect
from equivtest.oracle.exact import InexactData, Sum, find_integers, significand_bits, sum_products, sum_terms
from equivtest.tensors import DTYPES, same_bits
from tests.oracle.linear_cases import SETTINGS, linear_case, linear_cases


def differing(actual: torch.Tensor, case: LinearCase, name: str) -> int:
    """Counts the elements that the oracle rejects."""
    return int((actual.double() != expect(case, 0).tensors[name].value).sum())


@given(case=linear_cases())
@SETTINGS
def test_expected_tensors_have_a_layout_a_dtype_and_a_derivation(case):
    expected = expect(case, 0)

    for name, tensor in expected.tensors.items():
        assert tensor.layout == case.layouts()[name]
        assert (tuple(tensor.value.shape), tensor.value.dtype) == (case.shapes()[name], torch.float64)
        assert (tensor.dtype, tensor.allowed) == (case.dtype, None)
        assert tensor.derivation.startswith("equal: integers times a power of two, at most ")
        assert 1 <= expected.bits_used[name] <= significand_bits(DTYPES[case.dtype])


@pytest.mark.parametrize(
    ("requires_grad", "output", "weight", "bias"),
    [
        ((), False, False, False),
        (("x",), True, False, False),
        (("weight",), True, True, False),
        (("bias",), True, False, True),
    ],
)
def test_expected_requires_grad_follows_from_the_case(requires_grad, output, weight, bias):
    expected = expect(linear_case(requires_grad=requires_grad), 0).tensors

    flags = {name: expected[name].requires_grad for name in ("output", "param.weight", "param.bias")}
    assert flags == {"output": output, "param.weight": weight, "param.bias": bias}
    assert all(expected[f"grad.{name}"].requires_grad is None for name in requires_grad)


def test_derivation_of_exact_values_states_the_number_of_bits():
    expected = expect(linear_case(dtype="float32"), 0).tensors["output"]

    assert expected.derivation == "equal: integers times a power of two, at most 24 of 24 bits"


@pytest.mark.parametrize(
    ("mode", "name"), [("dense", "output"), ("dense", "grad.x"), ("dense", "grad.weight"), ("dense", "grad.bias")]
)
@pytest.mark.parametrize(
    ("dtype", "lower"), [("float32", torch.bfloat16), ("float32", torch.float16), ("float64", torch.float32)]
)
def test_reduction_in_a_lower_dtype_changes_the_result(mode, name, dtype, lower):
    case = linear_case(dtype=dtype, values=((mode, 0),))
    given = draw(case, 0)
    x, weight, cotangent = given["x"], given["weight"], given["cotangent"]
    left, right = {
        "output": (x, weight.T),
        "grad.x": (cotangent, weight),
        "grad.weight": (cotangent.T, x),
        "grad.bias": (torch.ones_like(cotangent[:, :1]).T, cotangent),
    }[name]
    halves = [left[:, part] @ right[part] for part in (slice(0, 2), slice(2, None))]
    total = sum(half.to(lower) for half in halves).to(x.dtype) + (given["bias"] if name == "output" else 0)

    assert differing(total.reshape(case.shapes()[name]), case, name) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropped_or_doubled_term_changes_every_output_on_dense_values(dtype):
    case = linear_case(dtype=dtype)
    given = {name: tensor.double() for name, tensor in draw(case, 0).items()}
    for dropped in range(case.in_features):
        term = given["x"][:, dropped, None] * given["weight"][:, dropped]
        output = functional.linear(given["x"], given["weight"], given["bias"])

        assert differing(output - term, case, "output") == differing(output + term, case, "output") == output.numel()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", LINEAR_MODES)
def test_bias_added_twice_or_never_changes_every_output(dtype, mode):
    case = linear_case(dtype=dtype, values=((mode, 0),))
    given = {name: tensor.double() for name, tensor in draw(case, 0).items()}
    product = given["x"] @ given["weight"].T

    assert all(differing(product + times * given["bias"], case, "output") == product.numel() for times in (0, 2, 3))


@pytest.mark.parametrize(("mode", "name"), [("wide-x", "x"), ("wide-w", "weight")])
@pytest.mark.parametrize(
    ("dtype", "kept_bits"), [("float64", 24), ("float32", 23), ("float32", 11), ("float16", 8), ("bfloat16", 4)]
)
def test_operand_truncated_to_fewer_bits_changes_every_output(mode, name, dtype, kept_bits):
    case = linear_case(dtype=dtype, values=((mode, 0),))
    given = {other: tensor.double() for other, tensor in draw(case, 0).items()}
    fractions, exponents = torch.frexp(given[name])
    given[name] = torch.ldexp((fractions * 2.0**kept_bits).trunc(), exponents - kept_bits)
    output = functional.linear(given["x"], given["weight"], given["bias"])

    assert differing(output, case, "output") == output.numel()


@pytest.mark.parametrize(("dtype", "kept_bits"), [("float64", 24), ("float32", 11), ("float16", 8), ("bfloat16", 4)])
def test_truncated_cotangent_changes_every_element_of_the_bias_gradient(dtype, kept_bits):
    case = linear_case(dtype=dtype, values=(("wide-g", 0),))
    fractions, exponents = torch.frexp(draw(case, 0)["cotangent"].double())
    truncated = torch.ldexp((fractions * 2.0**kept_bits).trunc(), exponents - kept_bits)
    gradient = truncated.reshape(-1, case.out_features).sum(0)

    assert differing(gradient, case, "grad.bias") == case.out_features


def test_swapped_tokens_change_the_output():
    case = linear_case()
    swapped = expect(case, 0).tensors["output"].value.roll(1, 0)

    assert differing(swapped, case, "output") == swapped.numel()


def test_data_whose_sums_need_more_bits_than_the_dtype_is_refused():
    case = linear_case(dtype="bfloat16", in_features=2, out_features=1, leading=(1,), bias=False)
    given = {"x": torch.tensor([[255.0, 3.0]]), "weight": torch.tensor([[1.0, 1.0]]), "cotangent": torch.ones(1, 1)}

    with pytest.raises(
        InexactData, match=r"output: a sum may reach 258 units, but torch.bfloat16 is exact only up to 2\*\*8"
    ):
        sum_linear(case, {name: tensor.bfloat16() for name, tensor in given.items()})


def test_sum_of_large_terms_that_cancel_is_refused_as_inexact():
    left, right = (find_integers("", torch.tensor(rows)) for rows in ([[200.0, 201.0]], [[1.0], [-1.0]]))

    with pytest.raises(InexactData, match="401 units"):
        sum_products("output", left, right, torch.bfloat16)


@pytest.mark.parametrize(("times", "refused"), [(1, False), (2, True)])
def test_term_that_sums_several_operands_counts_once_for_each_operand(times, refused):
    terms = find_integers("terms", torch.tensor([[100.0], [-29.0]]))

    if refused:
        with pytest.raises(InexactData, match="258 units"):
            sum_terms("sum", terms, torch.bfloat16, times=times)
    else:
        assert sum_terms("sum", terms, torch.bfloat16, times=times) == Sum(torch.tensor([71.0]).double(), 8)


@pytest.mark.parametrize(
    ("bias", "world_size", "refused"), [(5.0, 3, True), (6.0, 3, False), (5.0, 4, False), (5.0, 6, True)]
)
def test_bias_that_ranks_cannot_share_exactly_is_refused(bias, world_size, refused):
    case = linear_case(world_size=world_size, in_features=1, out_features=1, leading=(1,))
    given = {
        "x": torch.ones(1, 1),
        "weight": torch.ones(1, 1),
        "bias": torch.tensor([bias]),
        "cotangent": torch.ones(1, 1),
    }

    if refused:
        with pytest.raises(InexactData, match=f"no multiple of {world_size}"):
            sum_linear(case, given)
    else:
        assert sum_linear(case, given)["output"].value.item() == 1 + bias


@pytest.mark.parametrize("values", [[1.0, float("inf")], [float("nan")], [2.0**100, 1.0], [5e-324]])
def test_values_that_need_more_than_62_bit_integers_are_refused(values):
    with pytest.raises(InexactData, match=r"^x "):
        find_integers("x", torch.tensor(values, dtype=torch.float64))


def test_sum_of_terms_whose_units_are_too_far_apart_is_refused():
    large, small = (find_integers("", torch.tensor([[value]], dtype=torch.float64)) for value in (2.0**40, 2.0**-40))
    one = find_integers("", torch.tensor([1.0]))

    with pytest.raises(InexactData, match="too far apart"):
        sum_products("output", large, large, torch.float64, plus=find_integers("", torch.tensor([2.0**-40])))
    assert sum_products("output", large, small, torch.float64, plus=one).value.item() == 2.0


def test_sums_that_would_overflow_int64_are_refused():
    wide = find_integers("", torch.full((1, 1), 2.0**53 - 1, dtype=torch.float64))

    with pytest.raises(InexactData, match=r"more than 2\*\*62 units"):
        sum_products("output", wide, wide, torch.float64)


@given(integers=st.lists(st.integers(-(2**53), 2**53), min_size=1, max_size=5), exponent=st.integers(-300, 300))
@SETTINGS
def test_values_are_split_into_integers_times_their_largest_common_unit(integers, exponent):
    values = torch.tensor(integers, dtype=torch.float64) * 2.0**exponent
    found = find_integers("", values)

    assert torch.equal(found.integers.double() * 2.0**found.exponent, values)
    assert not values.any() or bool((found.integers % 2 != 0).any())


@pytest.mark.parametrize("mode", ["dense", "index", "wide", "special"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_expected_values_of_a_fetch_are_the_drawn_parameters(mode, dtype):
    case = FetchCase(
        world_size=2, parameters=((3,), (), (0, 2)), requires_grad=(True, False, True), dtype=dtype, values=((mode, 0),)
    )
    expected, given = expect(case, 0).tensors, draw(case, 0)

    assert tuple(expected) == case.answer_names()
    for index, flag in enumerate(case.requires_grad):
        param, partition = expected[f"param.{index}"], expected[f"partition.{index}"]
        assert torch.equal(param.value.to(DTYPES[dtype]), given[f"param.{index}"])
        assert torch.equal(param.value, partition.value)
        assert param.bits is not None and partition.bits is not None
        assert same_bits(param.bits, draw(case, 0)[f"param.{index}"]) and same_bits(param.bits, partition.bits)
        assert (param.requires_grad, partition.requires_grad) == (flag, None)
        assert param.layout.placements == (Replicate(),) and isinstance(partition.layout.placements[0], Flat)


def test_error_for_a_case_class_without_oracle_says_how_to_register_an_oracle():
    with pytest.raises(Misuse, match=r"no expected values are registered for Case: decorate .*expect.register"):
        expect(object.__new__(Case), 0)


def test_oracle_never_imports_processes_or_subjects():
    program = (
        "import sys, torch; before = set(sys.modules); from equivtest.cases.parts import modules_of; "
        "modules_of('oracle'), modules_of('collectives'); "
        "forbidden = ('torch.distributed', 'equivtest.cases.subject', 'equivtest.ranks', 'hypothesis'); "
        "print([name for name in set(sys.modules) - before "
        "if name.startswith(forbidden) or 'subject' in name.split('.')])"
    )

    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)

    assert found.stdout.strip() == "[]"
