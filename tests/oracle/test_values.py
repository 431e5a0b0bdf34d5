"""The values that seeds stand for: reproducible, exact in any order and split, and sharp."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings

from equivtest.cases.case import Case
from equivtest.cases.values import draw
from equivtest.errors import Misuse
from equivtest.families.linear.case import LINEAR_MODES, LinearCase, RefusedLinearCase
from equivtest.families.zero3.fetch.case import FETCH_MODES, FetchCase, RefusedFetchCase
from equivtest.tensors import DTYPES, SIGNIFICAND_BITS, same_bits
from tests.oracle.linear_cases import SETTINGS, linear_case, linear_cases

SHAPES = ((), (1,), (3,), (4, 5, 7), (0,), (2, 0), (300,))


def flat(case: LinearCase) -> dict[str, torch.Tensor]:
    """x (T, K), weight (N, K), bias (N,), cotangent (T, N), in units of 1/64: integers in float64."""
    given = {name: tensor.double() * 64 for name, tensor in draw(case, 0).items()}
    given["x"] = given["x"].reshape(-1, case.in_features)
    given["cotangent"] = given["cotangent"].reshape(-1, case.out_features)
    return given


def magnitudes_of(case: LinearCase) -> dict[str, float]:
    """The largest sum of magnitudes behind each contraction, in powers of two that the terms are multiples of."""
    given = flat(case)
    common = {name: math.gcd(*map(int, tensor.flatten().tolist())) for name, tensor in given.items()}
    unit = {name: divisor & -divisor for name, divisor in common.items()}
    x, weight, cotangent = (given[name].abs() / unit[name] for name in ("x", "weight", "cotangent"))
    output = x @ weight.T
    if case.bias:
        output = output + given["bias"].abs() * 64 / (unit["x"] * unit["weight"])
    sums = {
        "output": output,
        "grad.x": cotangent @ weight,
        "grad.weight": cotangent.T @ x,
        "grad.bias": cotangent.sum(0),
    }
    return {name: float(value.max()) for name, value in sums.items()}


def digest_of(case: Case) -> str:
    digest = hashlib.sha256()
    for index in range(len(case.values)):
        for name, tensor in draw(case, index).items():
            digest.update(name.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


REPRODUCED = (
    linear_case(values=tuple((mode, 7) for mode in LINEAR_MODES)),
    FetchCase(
        world_size=2,
        parameters=SHAPES,
        requires_grad=(True,) * len(SHAPES),
        dtype="bfloat16",
        values=tuple((mode, 7) for mode in FETCH_MODES),
    ),
)


def test_another_process_draws_the_same_values():
    cases = ", ".join(map(repr, REPRODUCED))
    program = f"from tests.oracle.test_values import *; torch.manual_seed(3); print(*map(digest_of, ({cases})))"

    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)

    assert other.stdout.split() == [digest_of(case) for case in REPRODUCED]


@pytest.mark.parametrize("case", REPRODUCED, ids=lambda case: type(case).__name__)
def test_drawing_does_not_use_the_global_generator(case):
    torch.manual_seed(1)
    first = digest_of(case)
    state = torch.get_rng_state()
    digest_of(case)
    assert torch.equal(torch.get_rng_state(), state)

    torch.manual_seed(2)

    assert digest_of(case) == first


def test_values_depend_on_the_seed_and_the_mode_but_not_on_the_index_of_the_draw():
    pairs = tuple(itertools.product(LINEAR_MODES, (0, 1)))
    case = linear_case(values=pairs)
    drawn = [draw(case, index)["x"] for index in range(len(pairs))]

    assert all(not torch.equal(left, right) for left, right in itertools.combinations(drawn, 2))
    assert torch.equal(draw(linear_case(values=(pairs[3],)), 0)["x"], drawn[3])


def test_values_do_not_depend_on_style_layouts_or_flags():
    plain = linear_case(leading=(6,))
    other = linear_case(
        leading=(6,), style="colwise", requires_grad=("x",), input_layout="shard(0)", x_contiguous=False
    )

    assert all(same_bits(draw(plain, 0)[name], draw(other, 0)[name]) for name in plain.given_names())


@given(case=linear_cases())
@SETTINGS
def test_linear_values_have_the_names_shapes_and_dtype_of_the_case(case):
    given = draw(case, 0)

    assert tuple(given) == case.given_names()
    for name, tensor in given.items():
        assert (tuple(tensor.shape), tensor.dtype) == (case.shapes()[name], DTYPES[case.dtype])
        assert tensor.is_contiguous() and tensor.device.type == "cpu"


@given(case=linear_cases())
@settings(SETTINGS, max_examples=200)
def test_magnitudes_of_the_terms_of_every_sum_fit_the_significand(case):
    assert max(magnitudes_of(case).values()) <= 2 ** SIGNIFICAND_BITS[case.dtype]


@pytest.mark.parametrize("mode", LINEAR_MODES)
@pytest.mark.parametrize("sizes", [(300, 4, 300), (1000, 3, 5), (5, 1000, 3), (1, 400, 1), (1, 1, 4096), (3, 257, 257)])
def test_magnitudes_fit_bfloat16_if_a_sum_has_more_terms_than_bfloat16_has_exact_integers(sizes, mode):
    tokens, features, outputs = sizes
    case = linear_case(
        leading=(tokens,), in_features=features, out_features=outputs, dtype="bfloat16", values=((mode, 0), (mode, 1))
    )

    assert max(magnitudes_of(case).values()) <= 256


def test_every_feature_and_token_has_a_nonzero_value_in_large_cases():
    given = flat(linear_case(leading=(300,), in_features=400, out_features=300, dtype="bfloat16", world_size=1))

    assert all(bool((given[name] != 0).any(dim).all()) for name in ("x", "weight", "cotangent") for dim in (0, 1))


@given(case=linear_cases(modes=("dense",)))
@SETTINGS
def test_dense_values_are_never_zero(case):
    assert all(bool((tensor != 0).all()) for tensor in draw(case, 0).values())


@given(case=linear_cases())
@SETTINGS
def test_no_value_is_negative_zero_subnormal_or_infinite(case):
    for tensor in draw(case, 0).values():
        assert not bool(((tensor == 0) & torch.signbit(tensor)).any())
        assert bool(((tensor == 0) | ((tensor.abs() >= 0.125) & torch.isfinite(tensor))).all())


@given(case=linear_cases())
@SETTINGS
def test_bias_is_nonzero_and_each_ranks_share_of_the_bias_is_exact(case):
    if case.bias:
        bias = draw(case, 0)["bias"]
        share = bias / case.world_size

        assert bool((bias != 0).all())
        assert torch.equal(share.double() * case.world_size, bias.double())


@given(case=linear_cases())
@SETTINGS
def test_cotangents_are_random(case):
    cotangent = draw(case, 0)["cotangent"]

    assert cotangent.numel() < 9 or len(cotangent.unique()) > 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_dense_values_give_an_output_that_needs_all_bits_of_the_dtype(dtype, bias):
    limit = 2 ** SIGNIFICAND_BITS[dtype]
    for seed, (tokens, features, outputs) in enumerate(
        itertools.product((1, 5, 33, 64), (1, 2, 12, 33, 64), (1, 7, 31, 64))
    ):
        case = linear_case(
            leading=(tokens,),
            in_features=features,
            out_features=outputs,
            dtype=dtype,
            bias=bias,
            world_size=1 + seed % 8,
            values=(("dense", seed),),
        )
        assert magnitudes_of(case)["output"] >= limit / 2, case


@given(case=linear_cases(modes=("dense",), dtypes=("float32", "float64")))
@SETTINGS
def test_dense_values_give_gradients_that_need_all_bits_of_float32_and_float64(case):
    sums = magnitudes_of(case)

    assert min(sums["grad.x"], sums["grad.weight"]) >= 2 ** SIGNIFICAND_BITS[case.dtype] / 2


@pytest.mark.parametrize(("mode", "name"), [("wide-x", "x"), ("wide-w", "weight")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_of_the_wide_operand_needs_the_whole_significand(mode, name, dtype):
    wide = draw(linear_case(dtype=dtype, values=((mode, 0),)), 0)[name]
    scale = 2.0 ** (SIGNIFICAND_BITS[dtype] - 1)
    fractions = torch.frexp(wide.double()).mantissa

    assert bool((fractions * scale != (fractions * scale).round()).all())


@pytest.mark.parametrize("mode", ["wide-x", "wide-w"])
def test_operand_that_selects_one_feature_per_row_covers_all_features(mode):
    case = linear_case(leading=(40,), in_features=12, out_features=40, values=((mode, 0),))
    selecting = flat(case)["weight" if mode == "wide-x" else "x"]

    assert bool(((selecting != 0).sum(1) == 1).all())
    assert set((selecting != 0).sum(0).tolist()) <= {3, 4}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", LINEAR_MODES)
def test_any_order_and_any_split_of_the_sums_give_the_same_bits(dtype, mode):
    case = linear_case(dtype=dtype, values=((mode, 3),))
    given, order = draw(case, 0), random.Random(0)
    products = given["x"][:, None, :] * given["weight"][None]  # (tokens, out_features, in_features), exact

    found = []
    for _ in range(20):
        terms = [*products.unbind(-1), *([given["bias"] / case.world_size] * case.world_size)]
        while len(terms) > 1:  # a random tree of additions, each rounded to the dtype
            left = terms.pop(order.randrange(len(terms)))
            right = terms.pop(order.randrange(len(terms)))
            terms.append(left + right)
        found.append(terms[0])

    assert all(torch.equal(found[0], other) for other in found)


def test_sums_of_random_real_values_depend_on_the_order():
    terms = list(torch.randn(33, generator=torch.Generator().manual_seed(0)))
    order = random.Random(0)

    assert len({float(sum(order.sample(terms, 33))) for _ in range(20)}) > 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["dense", "index", "wide"])
def test_parameters_are_finite_normal_and_never_zero(dtype, mode):
    case = FetchCase(
        world_size=2, parameters=SHAPES, requires_grad=(True,) * len(SHAPES), dtype=dtype, values=((mode, 0),)
    )
    given = draw(case, 0)

    assert [tuple(tensor.shape) for tensor in given.values()] == list(SHAPES)
    for tensor in given.values():
        assert tensor.dtype == DTYPES[dtype]
        assert bool((torch.isfinite(tensor) & (tensor.abs() >= torch.finfo(tensor.dtype).tiny)).all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mode_index_numbers_the_elements_of_all_parameters(dtype):
    case = FetchCase(
        world_size=2, parameters=((2, 3), (), (300,)), requires_grad=(True,) * 3, dtype=dtype, values=(("index", 0),)
    )
    values = torch.cat([tensor.reshape(-1) for tensor in draw(case, 0).values()]).tolist()
    period = 2 ** SIGNIFICAND_BITS[dtype] - 1

    assert values == [1 + place % period for place in range(307)]


def test_mode_wide_draws_parameters_with_all_bits_and_many_exponents():
    case = FetchCase(world_size=2, parameters=((1000,),), dtype="float16", values=(("wide", 0),))
    fractions, exponents = torch.frexp(draw(case, 0)["param.0"].double())

    assert bool(((fractions * 2.0**11) % 2 == 1).all())
    assert set(exponents.tolist()) == set(range(-13, 17))
    assert len(fractions.sign().unique()) == 2


@pytest.mark.parametrize(
    ("dtype", "other"), [("float32", torch.float64), ("bfloat16", torch.float64), ("float64", torch.float32)]
)
def test_drawn_values_have_the_kind_of_invalid_input_that_the_case_names(dtype, other):
    base = {"world_size": 2, "dtype": dtype}
    linear = {"style": "colwise", "leading": (2,), "in_features": 4, **base}

    assert draw(RefusedLinearCase(misfit="in_features", **linear), 0)["x"].shape == (2, 5)
    assert draw(RefusedLinearCase(misfit="dtype", **linear), 0)["x"].dtype == other
    two = {"parameters": ((3,), (3,)), "requires_grad": (True, True), **base}
    dtypes = [tensor.dtype for tensor in draw(RefusedFetchCase(misfit="dtype", **two), 0).values()]
    assert dtypes == [DTYPES[dtype], other]
    in_flight = draw(RefusedFetchCase(misfit="in_flight", **two), 0)
    assert {tensor.dtype for tensor in in_flight.values()} == {DTYPES[dtype]}


def test_error_for_a_case_class_without_values_says_how_to_register_values():
    with pytest.raises(Misuse, match=r"no values are registered for Case: decorate .*draw.register"):
        draw(object.__new__(Case), 0)
