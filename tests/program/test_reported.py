"""Values that a step reports beside rows and numbers, and steps that only evaluate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from equivtest.errors import Misuse
from equivtest.module import ids, module_property, real
from equivtest.oracle import expect
from equivtest.programs.case import PARTS_OF_WHOLE, REAL_DTYPES, ModuleCase
from equivtest.property import Property, Space
from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import judge
from tests.drawing import smallest

HERE = "tests.programs.metrics:"
TWO_RANKS = Space((2,), ("float32", "float64"))


def step_of(step: str = "trains", **fields: Any) -> ModuleCase:
    fields = {"world_size": 2, "optimizer": f"{HERE}sgd", "build": f"{HERE}metered", "num_rows": 2} | fields
    return ModuleCase(
        parallelize=f"{HERE}replicated",
        inputs=(("x", "real", ("batch", 3)), ("kind", "ids(2)", ("batch",))),
        sizes=(("batch", fields.pop("num_rows")),),
        batch=PARTS_OF_WHOLE,
        step=HERE + step,
        values=(("real", 0),),
        **fields,
    )


def wrong_tensors(case: ModuleCase, pool: Pool) -> set[str]:
    verdicts = judge("module", case, pool)
    return {mismatch.tensor for verdict in verdicts for mismatch in verdict.judgement.mismatches}


@pytest.mark.ranks
@pytest.mark.parametrize("num_rows", [2, 3, 5])
def test_right_step_that_returns_a_tensor_of_fixed_size_passes(pool: Pool, num_rows: int) -> None:
    assert wrong_tensors(step_of(num_rows=num_rows), pool) == set()


@pytest.mark.ranks
@pytest.mark.parametrize("num_rows", [2, 3])
@pytest.mark.parametrize("name", ["sums", "counts"])
def test_unreduced_tensor_of_fixed_size_that_a_step_returns_is_rejected(pool: Pool, name: str, num_rows: int) -> None:
    assert f"output.{name}" in wrong_tensors(step_of(f"trains_with_own_{name}", num_rows=num_rows), pool)


@pytest.mark.ranks
def test_message_names_the_factor_by_which_all_gradients_of_a_step_are_wrong(pool: Pool) -> None:
    verdicts = judge("module", step_of("trains_twice_as_much", num_rows=5), pool)
    patterns = {mismatch.pattern for verdict in verdicts for mismatch in verdict.judgement.mismatches}

    assert patterns == {"actual / expected = 2.000 at every wrong element"}


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("form", ["float64", "numbers", "one_element"])
def test_right_number_that_a_step_returns_passes_in_any_form(pool: Pool, form: str, dtype: str) -> None:
    case = step_of(f"reports_{form}", dtype=dtype, num_rows=4, by_parts=dtype not in REAL_DTYPES)

    assert wrong_tensors(case, pool) == set()


@pytest.mark.ranks
@pytest.mark.parametrize(("form", "dtype"), [("float32", "float64"), ("bfloat16", "float16"), ("bfloat16", "float32")])
def test_number_that_a_step_returns_in_a_narrower_dtype_is_rejected(pool: Pool, form: str, dtype: str) -> None:
    case = step_of(f"reports_{form}", dtype=dtype, num_rows=4, by_parts=dtype not in REAL_DTYPES)

    assert "output.loss" in wrong_tensors(case, pool)


@pytest.mark.ranks
@pytest.mark.parametrize("form", ["integers", "doubled"])
def test_wrong_number_that_a_step_returns_in_a_wider_dtype_is_rejected(pool: Pool, form: str) -> None:
    case = step_of(f"reports_{form}", dtype="bfloat16", num_rows=4, by_parts=True)

    assert {"output.loss", "output.squares"} <= wrong_tensors(case, pool)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("followed", r"output\.starts must have the same shape .* \(3,\) on 2 rows and"),
        (
            "of_two_rows",
            r"output\.own has shape \(2,\), but whether its first dim is the 2 rows of the batch is unknown",
        ),
    ],
)
def test_step_output_without_rows_or_fixed_size_raises_misuse(build: str, message: str) -> None:
    with pytest.raises(Misuse, match=message):
        ModuleCase(
            world_size=2, build=HERE + build, parallelize=f"{HERE}replicated", x_shape=(2, 3),
            step=f"{HERE}trains", batch=PARTS_OF_WHOLE, values=(("real", 0),),
        )  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("num_rows", [2, 3])
def test_right_evaluation_step_passes_without_gradients(pool: Pool, num_rows: int) -> None:
    case = step_of("evaluates", build=f"{HERE}evaluated", optimizer="", num_rows=num_rows)

    assert wrong_tensors(case, pool) == set()
    assert all(each.may_be_none for name, each in expect(case, 0).tensors.items() if name.startswith("grad."))


@pytest.mark.ranks
def test_evaluation_step_without_a_reduction_is_rejected(pool: Pool) -> None:
    case = step_of("evaluates_own_rows", build=f"{HERE}evaluated", optimizer="", num_rows=3)

    assert wrong_tensors(case, pool) == {"output.loss", "output.sums", "output.counts"}


@pytest.mark.ranks
@pytest.mark.parametrize("build", ["evaluated", "counted"])
def test_module_without_gradients_is_judged_without_a_step(pool: Pool, build: str) -> None:
    case = replace(step_of(build=HERE + build, num_rows=3), batch="mean of parts", step="", optimizer="")

    assert wrong_tensors(replace(case, parallelize=f"{HERE}same"), pool) == set()
    assert wrong_tensors(replace(case, parallelize=f"{HERE}shifted"), pool) >= {"output.counts"}


@pytest.mark.parametrize("build", ["evaluated", "counted"])
def test_property_of_an_evaluation_step_draws_cases(build: str) -> None:
    case = smallest(evaluation(build).cases(TWO_RANKS), lambda _: True)

    assert case.training.step and not case.judge.by_parts


def test_step_with_gradients_and_no_loss_raises_misuse() -> None:
    with pytest.raises(Misuse, match=r"a step needs a loss, .* without gradients, as under torch.no_grad"):
        evaluation("metered", outputs=("sums",)).cases(TWO_RANKS)


def evaluation(build: str, **fields: Any) -> Property:
    return module_property(
        HERE + build,
        f"{HERE}same",
        inputs={"x": real(("batch", 3)), "kind": ids(2, ("batch",))},
        sizes={"batch": (2,)},
        step=f"{HERE}evaluates",
        batch=PARTS_OF_WHOLE,
        **fields,
    )
