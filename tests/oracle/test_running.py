"""Bounds of whole modules: no correct program is beyond them, what is wrong is, what is not known is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.exact import InexactData
from equivtest.oracle.ranged import Parts, Ranged
from equivtest.oracle.rounding import TORCH_CPU, Bounded
from equivtest.oracle.running import RunningError
from equivtest.programs.case import with_parameters
from tests.oracle.running_modules import (
    ABOVE,
    FEATURES,
    MODULES,
    NARROWER_WITHIN,
    REFUSED,
    Function,
    Of,
    of,
    stored_in_16_bits,
)
from tests.oracle.running_programs import SCALES, Tensors, actual, bound_of, given_of, programs

each_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())


def margin(right: dict[str, Bounded], found: Tensors) -> float:
    """The largest error over what is allowed."""
    assert right.keys() == found.keys()
    for name, bounded in right.items():
        assert bool((bounded.allowed >= 0).all()) and torch.equal(found[name].isnan(), bounded.value.isnan()), name
    ratios = [(found[name] - bounded.value).abs() / bounded.allowed for name, bounded in right.items()]
    return max(float(ratio.nan_to_num(nan=0.0).max()) for ratio in ratios)  # 0 / 0, and what is NaN in both


@each_module
@pytest.mark.parametrize(("scale", "offset"), SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_correct_program_is_within_the_bound(
    make: Callable[[], nn.Module], dtype: torch.dtype, scale: float, offset: float
) -> None:
    """Neither torch's own kernels, nor sums of shares, nor an exact program that rounds its result once."""
    given = given_of(make, dtype, scale, offset)
    right = bound_of(make, given)

    assert all(margin(right, found) <= 1 for found in programs(make, given))


@pytest.mark.parametrize("module", MODULES)
def test_bounds_of_float64_modules_are_below_a_millionth_of_the_values(module: str) -> None:
    """In float64 the bound allows at most a millionth of the root mean square, except for values that are zero.

    For values computed in float32, a thousandth.
    """
    make, largest = MODULES[module], 1e-3 if module in NARROWER_WITHIN else 1e-6
    for name, bounded in bound_of(make, given_of(make, torch.float64)).items():
        assert bool(bounded.allowed.isfinite().all()), name
        assert 0 < bounded.allowed.max() < largest * bounded.value.square().mean().sqrt() or bool(
            (bounded.value.abs() <= bounded.allowed).all()
        ), name


def test_bound_allows_sigmoid_zero_if_its_exponential_overflows() -> None:
    """exp(89) is no float32 number; the quotient itself, 1e-39, is."""
    given = {"x": torch.full((1, FEATURES), -89.5)}
    exact = {
        name: tensor.float().double()
        for name, tensor in actual(nn.Sigmoid, given, torch.float64, nullcontext()).items()
    }

    assert margin(bound_of(nn.Sigmoid, given), exact) <= 1
    assert margin(bound_of(nn.Sigmoid, given), {name: torch.zeros_like(tensor) for name, tensor in exact.items()}) <= 1


def test_gradient_that_cancels_is_zero_within_its_bound() -> None:
    right = bound_of(
        of(lambda x, w: ((x @ w).sum(-1, keepdim=True) + x).softmax(-1)), given_of(lambda: Of(torch.mm), torch.float64)
    )

    assert bool((right["grad.weight"].value.abs() <= right["grad.weight"].allowed).all())
    assert float(right["grad.weight"].allowed.max()) < 1e-10


@pytest.mark.parametrize("name", REFUSED)
def test_unknown_operation_is_refused(name: str) -> None:
    make, told = REFUSED[name]
    with pytest.raises(InexactData, match=told):
        bound_of(make, given_of(make, torch.float64))


def attended(x: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.native_dropout(x @ w, 0.0, train=True)[0],
        lambda x, w: torch.native_dropout(x @ w, 0.5, train=False)[0],
        lambda x, w: attended((x @ w)[None, None])[0, 0],
        lambda x, w: functional.dropout(x @ w, 0.0, training=True),
    ],
    ids=["native dropout of nothing", "native dropout out of training", "attention", "dropout of nothing"],
)
def test_operation_with_dropout_probability_zero_draws_no_random_number(function: Function, dtype: torch.dtype) -> None:
    """Though torch marks all of these operations as ones that may."""
    given = given_of(of(function), dtype)
    mode = RunningError(arithmetic_of(str(dtype).removeprefix("torch.")), ranks=2)
    ranged = {name: mode.exactly(value) for name, value in given.items()}
    with mode:  # and torch's own kernel of attention
        output = with_parameters(of(function)(), {"weight": ranged["weight"]})(ranged["x"])

    assert bool(mode.bounded(output).allowed.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        torch.abs,
        torch.clone,
        torch.Tensor.relu,
        lambda each: each.float() if each.dtype == torch.float64 else each.double(),
        lambda each: each.masked_fill(each > 1e9, 0.0),
        lambda each: torch.where(each < 1e9, each, 0.0),
        lambda each: torch.native_dropout(each, 0.0, train=True)[0],
        lambda each: torch.cat([each]),
    ],
    ids=["abs", "clone", "relu", "cast", "masked_fill", "where", "dropout p=0", "cat"],
)
def test_write_to_a_result_changes_neither_operand_nor_bound(
    function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    mode = RunningError(arithmetic_of(str(dtype).removeprefix("torch.")), ranks=2)
    x = torch.linspace(0.3, 1.7, 6).to(dtype)
    exact = mode.exactly(x)
    with mode:
        operand = exact * 0.7
        exact.zero_()
        result = function(operand)
    before, right = [part.clone() for part in Parts.of(operand)], mode.bounded(result)
    value = right.value.clone()
    with mode:
        result.zero_()

    assert all(map(torch.equal, Parts.of(operand), before)) and torch.equal(right.value, value) and bool(x.all())


def test_copied_module_has_the_values_and_errors_of_its_parameters_and_shares_none() -> None:
    """AveragedModel copies the module that an optimizer trains."""
    layer, off = torch.nn.Linear(2, 1, bias=False), torch.full((1, 2), 0.5, dtype=torch.float64)
    given = Ranged(layer.weight.detach().clone(), off, off + 9)
    with RunningError(arithmetic_of("float32"), ranks=2):
        layer.weight = torch.nn.Parameter(given)
        copied = copy.deepcopy(torch.nn.ModuleList([layer, layer]))
    weight: Any = copied[0].weight
    weight.value.zero_()

    assert isinstance(weight, torch.nn.Parameter) and weight is copied[1].weight and weight.requires_grad
    assert torch.equal(weight.error, off) and torch.equal(weight.magnitude, off + 9)
    assert layer.weight.value.all()  # type: ignore[attr-defined]


def test_dropout_with_probability_zero_of_a_constant_is_a_constant() -> None:
    mode = RunningError(arithmetic_of("float32"), ranks=2)
    with mode:
        made = torch.native_dropout(torch.full((3,), 0.5), 0.0, train=True)[0]

    assert isinstance(made, Ranged) and made.origin.is_constant


def test_torch_where_with_an_uncertain_condition_has_an_infinite_bound() -> None:
    right = bound_of(
        of(lambda x, w: torch.where((x @ w) < (x @ w.clone()), x, -x)), given_of(lambda: Of(torch.mm), torch.float64)
    )

    assert bool(right["output"].allowed.isinf().all())


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x, w: x[(x @ w).sum(-1).topk(2).indices], "topk"),
        (lambda x, w: x[(x @ w).sum(-1).sort().indices], "sort"),
        (lambda x, w: x[(x @ w).sum(-1).argmax()], "argmax"),
        (lambda x, w: (x @ w).sum(-1).max(0).values * x, "max"),
        (lambda x, w: x * len(((x @ w) - (x @ w.clone())).nonzero()), "nonzero"),
        (lambda x, w: x * (((x @ w) - (x @ w.clone())) + 1).long(), "a conversion to whole numbers"),
    ],
    ids=["topk", "sort", "argmax", "max", "nonzero", "to whole numbers"],
)
def test_comparison_that_rounding_may_change_is_reported_with_an_infinite_bound(function: Function, name: str) -> None:
    given = given_of(lambda: Of(torch.mm), torch.float64)
    given["weight"][:] = given["weight"] + given["weight"].flip(0)
    given["x"][0] *= (given["x"] @ given["weight"]).sum(-1)[0].sign()
    given["x"][1], given["x"][2:] = given["x"][0].flip(0), -given["x"][0]
    right = bound_of(of(function), given)["output"]

    assert bool(right.allowed.isinf().all())
    assert re.match(
        rf"undecided: {name} depends on values that may .*, at .*test_running.py:\d+, `\(lambda x, w: ",
        right.derivation,
    )


def test_calling_item_on_an_exact_tensor_is_allowed() -> None:
    right = bound_of(
        of(lambda x, w: (x @ w) * int((ABOVE.sum(-1) > 2).sum().item()) * x[0, 0].item()),
        given_of(lambda: Of(torch.mm), torch.float64),
    )["output"]

    assert bool(right.allowed.isfinite().all())


def test_tensor_of_ones_is_not_constant_if_a_computed_value_was_written_to_it() -> None:
    """The written value depends on x, also in a view: its product with 1 may be a sum of shares."""

    def written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(5, FEATURES, dtype=x.dtype)
        ones[0] = (x @ w)[0]
        return ones * torch.ones((), dtype=x.dtype)

    allowed = bound_of(of(written), given_of(lambda: Of(torch.mm), torch.float64))["output"].allowed

    assert bool((allowed[0] > allowed[1]).all())


def test_bound_includes_the_rounding_to_a_narrower_inner_dtype() -> None:
    """A norm that computes in float32, in a module of float64."""
    right = bound_of(
        of(lambda x, w: ((x @ w).float() * 0.1).to(x.dtype)), given_of(lambda: Of(torch.mm), torch.float64)
    )["output"]

    assert bool((right.allowed > 2.0**-24 * right.value.abs()).all()) and bool((right.allowed < 1e-4).all())


@pytest.mark.parametrize("ranks", [3, 5, 7])
def test_bound_of_a_copied_value_allows_an_average_over_the_ranks(ranks: int) -> None:
    make = of(lambda x, w: torch.cat([x, w]))
    given = given_of(make, torch.float32)
    found = actual(make, given, torch.float32, nullcontext())
    averaged = {name: sum([tensor.float() / ranks] * ranks, torch.zeros(())).double() for name, tensor in found.items()}

    assert any(not torch.equal(averaged[name], found[name]) for name in found)
    assert margin(bound_of(make, given, ranks), averaged) <= 1


def test_bound_grows_with_ranks_and_terms() -> None:
    make, given = of(torch.mm), given_of(of(torch.mm), torch.float32)

    assert bool(
        (bound_of(make, given, ranks=8)["output"].allowed > bound_of(make, given, ranks=1)["output"].allowed).all()
    )


def test_bound_includes_the_rounding_of_a_16_bit_write() -> None:
    given = given_of(of(torch.mm), torch.float64)
    right = bound_of(of(stored_in_16_bits), given)["output"]

    assert bool((right.allowed > 2.0**-9 * right.value.abs()).all())


def test_unbounded_value_has_an_infinite_bound_and_never_nan() -> None:
    """Never NaN, beside which nothing would be allowed."""
    right = bound_of(
        of(lambda x, w: (x @ w).masked_fill(torch.eye(5, 6).bool(), -1e308).softmax(-1)),
        given_of(of(torch.mm), torch.float64),
    )

    assert not any(bool(bounded.allowed.isnan().any()) for bounded in right.values())


def test_module_that_computes_in_another_dtype_rounds_to_that_dtype() -> None:
    given = given_of(of(torch.mm), torch.float64)
    inside = bound_of(of(lambda x, w: (x.float() @ w.float()).double()), given)["output"].allowed

    assert bool((inside > 1e6 * bound_of(of(torch.mm), given)["output"].allowed).all())


def test_torchs_hardsigmoid_gradient_is_still_wrong_in_float64() -> None:
    """Finding 42: if this fails, torch is mended, and `UNKNOWN_IN_FLOAT64` need not name it."""
    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    nn.functional.hardsigmoid(x).backward()

    assert x.grad is not None and float(x.grad) == float(torch.tensor(1 / 6, dtype=torch.float32)) != 1 / 6


@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_bound_of_a_softmax_covers_the_errors_of_its_terms(size: float) -> None:
    """Each in turn up, all others down, and the other way round; a term alone, all others masked, is 1."""
    x = torch.tensor([[1.0, -0.5, 0.25], [2.0, -torch.inf, -torch.inf]], dtype=torch.float64)
    off = torch.where(x.isinf(), 0.0, size)
    given, counted = Ranged(x, off, x.abs() + off), RunningError(TORCH_CPU["float64"], 1)
    with counted:
        found = torch.softmax(given, -1)
    bound = counted.bounded(found).allowed
    shifts = [torch.eye(3, dtype=torch.float64)[each] * 2 - 1 for each in range(3)]
    apart = [(torch.softmax(x + sign * off * shift, -1) - x.softmax(-1)).abs() for shift in shifts for sign in (1, -1)]
    reached = torch.stack(apart).amax(0)

    assert bool((reached <= bound).all()) and bool((bound[0] <= 1.001 * reached[0]).all())
    assert float(bound[1].max()) < 1e-13


def test_softmax_of_unbounded_terms_is_unbounded() -> None:
    x = torch.tensor([[0.0, -1000.0]], dtype=torch.float64)
    given, counted = Ranged(x, torch.full_like(x, 2000.0), x.abs() + 2000.0), RunningError(TORCH_CPU["float64"], 1)
    with counted:
        found = torch.softmax(given, -1)

    assert bool((counted.bounded(found).allowed >= 1).all())


def test_softmax_over_an_empty_dim_has_an_empty_bound() -> None:
    x = torch.zeros(3, 0, dtype=torch.float64)
    given, counted = Ranged(x, x, x), RunningError(TORCH_CPU["float64"], 1)
    with counted:
        found = torch.softmax(given, -1)

    assert counted.bounded(found).allowed.shape == (3, 0)
