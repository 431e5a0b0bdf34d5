"""Bounds: no kernel of torch exceeds one, and none is so wide that it proves nothing."""

from __future__ import annotations

import pytest
import torch

from equivtest.families.training.oracle import optimizers
from equivtest.oracle import activations, contractions
from equivtest.oracle.rounding import TORCH_CPU, Bounded
from equivtest.tensors import DTYPES
from equivtest.verdicts.judging import one_thread
from studies.bounded_ops import OPERATIONS, Margins, Table, new_table, run_round, show, whole_modules

each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(scope="module")
def table() -> Table:
    """A few hundred thousand elements of every operation in every dtype; whole modules, which take longest, once."""
    found = new_table()
    with one_thread():
        run_round(0, found)
        for seed in range(1, 6):
            run_round(seed, found, [operation for operation in OPERATIONS if operation is not whole_modules])
    return found


def test_every_kernel_of_torch_is_within_its_bound(table: Table) -> None:
    assert sum(margins.elements for margins in table.values()) > 100_000
    assert {key: margins.violations for key, margins in table.items() if margins.violations} == {}


@pytest.mark.parametrize("name", ["linear", "linear grad.x", "split linear", "gelu", "silu backward", "reduce sum"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_errors_of_16_bit_kernels_nearly_reach_their_bounds(table: Table, name: str, dtype: str) -> None:
    """Storage dominates there: a bound twice as wide as it must be would show."""
    assert table[name, dtype].largest > 0.5


def test_table_of_bounds_has_a_row_for_every_operation_and_dtype(table: Table) -> None:
    rows = [(name, dtype) for name in {name for name, _ in table} for dtype in DTYPES]

    assert table.keys() == set(rows) and len(list(show(table))) == 1 + len(rows)


def test_margins_count_elements_beyond_their_bounds() -> None:
    margins = Margins()
    margins.add(torch.tensor([1.0, 2.0]), Bounded(torch.ones(2), torch.full((2,), 0.5)))

    assert (margins.elements, margins.violations, margins.largest) == (2, 1, 2.0)


def matrices(dtype: str, *shapes: tuple[int, int]) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=source, dtype=torch.float64).to(DTYPES[dtype]) for shape in shapes]


@each_dtype
def test_dropped_product_is_beyond_the_bound_of_a_linear_layer(dtype: str) -> None:
    x, weight = matrices(dtype, (4, 8), (5, 8))
    bound = contractions.linear(x, weight, None, TORCH_CPU[dtype])
    short = x[:, :-1].double() @ weight[:, :-1].double().T

    assert ((short - bound.value).abs() > bound.allowed).all()


@each_dtype
def test_partial_sum_reduced_in_fewer_bits_is_beyond_the_bound(dtype: str) -> None:
    """On three ranks; bfloat16's own partial sums are within it."""
    operands = torch.stack(matrices(dtype, (8, 8), (8, 8), (8, 8)))
    bound = contractions.all_reduce(operands, TORCH_CPU[dtype])
    error = (operands.bfloat16().sum(0).double() - bound.value).abs()

    assert bool((error > bound.allowed).any()) == (dtype != "bfloat16")


def test_sum_in_place_of_an_average_is_beyond_the_bound() -> None:
    operands = torch.stack(matrices("bfloat16", (4, 4), (4, 4)))
    bound = contractions.all_reduce(operands, TORCH_CPU["bfloat16"], average=True)

    assert ((operands.double().sum(0) - bound.value).abs() > bound.allowed).all()


def test_bound_of_a_sum_is_tighter_if_the_ranks_partial_sums_are_known() -> None:
    x, weight = matrices("bfloat16", (4, 32), (5, 32))
    partials = sum(
        (x_r.double() @ w_r.double().T).abs() for x_r, w_r in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)
    )
    free, known = (
        contractions.linear(x, weight, None, TORCH_CPU["bfloat16"], ranks=2, partials=given)
        for given in (None, partials)
    )

    assert (known.allowed < free.allowed).all()


@pytest.mark.parametrize("ranks", [1, 2])
def test_result_that_may_overflow_float16_has_an_infinite_bound(ranks: int) -> None:
    """60000 + 60000 is beyond 65504, the largest number; so may be a sum that comes back below."""
    x, weight = torch.tensor([[6e4, 6e4, -6e4]]).half(), torch.ones(1, 3).half()
    bound = contractions.linear(x, weight, None, TORCH_CPU["float16"], ranks=ranks)

    assert bound.allowed.isinf().all() == (ranks == 2)
    assert contractions.linear(x[:, :2], weight[:, :2], None, TORCH_CPU["float16"]).allowed.isinf().all()


def test_bound_of_an_average_of_subnormals_allows_an_underflow_on_every_rank() -> None:
    operands = torch.full((2, 1), 2.0**-24).half()
    bound = contractions.all_reduce(operands, TORCH_CPU["float16"], average=True)

    assert float(bound.value) == 2.0**-24
    assert 2.0**-24 <= float(bound.allowed) < 2.0**-23


def test_inexact_input_widens_the_bound_of_its_results() -> None:
    x, weight = matrices("float32", (2, 3), (2, 3))
    off = Bounded(x.double(), torch.full((2, 3), 0.5, dtype=torch.float64))
    moved = (x.double() + 0.5) @ weight.double().T
    bound = contractions.linear(off, weight, None, TORCH_CPU["float32"])

    assert ((moved - bound.value).abs() <= bound.allowed).all()


@pytest.mark.parametrize("op", [activations.gelu, activations.silu, activations.relu])
def test_bound_of_an_activation_includes_the_error_of_its_input(op: object) -> None:
    x = torch.arange(-48, 49, dtype=torch.float64) / 8
    off = Bounded(x, torch.full((97,), 0.25, dtype=torch.float64))
    at, moved = op(off, TORCH_CPU["float64"]), op(x + 0.25, TORCH_CPU["float64"])  # type: ignore[operator]

    assert ((moved.value - at.value).abs() <= at.allowed).all()


def test_bound_of_a_relu_gradient_is_wide_if_the_sign_of_x_is_uncertain() -> None:
    x = Bounded(torch.tensor([0.1, 2.0], dtype=torch.float64), torch.tensor([0.2, 0.2], dtype=torch.float64))
    bound = activations.relu_grad(x, torch.ones(2), TORCH_CPU["float32"])

    assert bound.allowed.tolist() == [1.0, 0.0]


def test_bound_of_an_adamw_update_is_infinite_if_its_denominator_may_be_zero() -> None:
    zero = torch.zeros(1)
    grad = Bounded(torch.zeros(1, dtype=torch.float64), torch.full((1,), 0.1, dtype=torch.float64))
    bounds = optimizers.adamw_step(zero, (zero, zero), grad, 1, optimizers.AdamOptions(eps=0.0), TORCH_CPU["float32"])

    assert bounds["param"].allowed.isinf().all()
    assert bounds["exp_avg"].allowed.isfinite().all()


def test_adamw_may_leave_a_parameter_unchanged_if_its_second_moment_overflows() -> None:
    """float16 holds no 817**2 / 10, and torch divides by what it stored."""
    param, options = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16)), optimizers.AdamOptions(0.1, 0.9, 0.9)
    zero, param.grad = torch.zeros_like(param), torch.full_like(param, 817.0)
    bounds = optimizers.adamw_step(zero, (zero, zero), param.grad, 1, options, TORCH_CPU["float16"])
    torch.optim.AdamW([param], lr=options.lr, betas=(0.9, 0.9), foreach=False).step()

    assert not param.any()
    assert bool(((param.double() - bounds["param"].value).abs() <= bounds["param"].allowed).all())
    assert float(bounds["param"].allowed) < 0.11


@each_dtype
def test_adamw_step_without_bias_correction_is_beyond_the_bound(dtype: str) -> None:
    param, grad = matrices(dtype, (8, 8), (8, 8))
    zero, options = torch.zeros_like(param), optimizers.AdamOptions(lr=0.1)
    bound = optimizers.adamw_step(param, (zero, zero), grad, 1, options, TORCH_CPU[dtype])["param"]
    wrong = param.double() * (1 - 0.1 * options.weight_decay) - 0.1 * 0.1 * grad.sign() / 0.001**0.5

    assert ((wrong - bound.value).abs() > bound.allowed).any()


def test_sum_of_zeros_must_be_exactly_zero() -> None:
    zeros, ones = torch.zeros(2, 3), torch.ones(3, 4)
    for ranks in (1, 3):
        assert not contractions.product(zeros, ones, TORCH_CPU["float16"], ranks=ranks).allowed.any()
        assert not contractions.total(zeros, 0, TORCH_CPU["float16"], ranks=ranks).allowed.any()
        added = contractions.product(zeros, ones, TORCH_CPU["float16"], plus=torch.ones(4), ranks=ranks)
        assert added.allowed.all()
    assert contractions.product(torch.full((2, 3), 1e-5), ones * 1e-5, TORCH_CPU["float16"]).allowed.all()


@each_dtype
def test_adamw_moments_of_a_zero_gradient_must_be_exactly_zero(dtype: str) -> None:
    zero, options = torch.zeros(2, dtype=torch.float64), optimizers.AdamOptions(lr=0.1)
    param = torch.tensor([0.0, 1.0], dtype=torch.float64)
    after = optimizers.adamw_step(param, (zero, zero), zero, 1, options, TORCH_CPU[dtype])

    assert not after["exp_avg"].allowed.any() and not after["exp_avg_sq"].allowed.any()
    assert dtype == "float16" or (after["param"].allowed > 0).tolist() == [False, True]


def test_sum_of_cancelling_terms_has_a_bound_above_zero() -> None:
    terms = torch.tensor([[1.0], [-1.0]])

    assert contractions.total(terms, 0, TORCH_CPU["bfloat16"], ranks=2).allowed.all()
    assert contractions.product(terms.T, torch.ones(2, 1), TORCH_CPU["bfloat16"]).allowed.all()
