"""Modules without a useful bound: the message says from which part on no bound decides, and names a remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from equivtest.errors import Misuse
from equivtest.module import module_property, real
from equivtest.programs import candidates
from equivtest.programs.bounds import reason_in
from equivtest.programs.case import ModuleCase
from equivtest.property import Space

HERE = "tests.programs.module:"


STEPS = "tests.programs.steps:"
STEP = "tests.programs.steps:never_called"


def told(
    build: str, shape: tuple[int, ...], dtype: str, *, where: str = HERE, batch: str = "whole", **fields: Any
) -> str:
    prop = module_property(where + build, HERE + "whole", (shape,), batch=batch, **fields)
    with pytest.raises(Misuse) as raised:
        prop.cases(Space((1,), (dtype,)))
    return str(raised.value)


def test_refusal_names_the_first_layer_whose_bound_is_too_wide() -> None:
    """No dtype would help; judging by parts would."""
    message = told("deep", (2, 3), "float32", by_parts=False)

    assert (
        "may add up to more than 0.1 times output; the bound is too wide from the value at 6.0 on (float64 would not "
        "be enough): pass by_parts=True, or omit by_parts, to judge each part alone; or judge a smaller part" in message
    )


def test_refusal_of_a_too_wide_bound_in_the_backward_names_a_submodule_and_a_dtype() -> None:
    message = told("encoder_layer", (1, 3, 4), "float32", by_parts=False)

    assert (
        "more than 0.1 times grad.x; the bound is too wide from the gradient at norm1:input on: pass by_parts=True, or "
        "omit by_parts, to judge each part alone; or use float64, which is enough (--dtypes float64); or judge a "
        "smaller part" in message
    )


def test_refusal_names_the_submodule_with_the_first_too_wide_bound() -> None:
    message = told("encoder_layer", (1, 3, 4), "bfloat16")

    assert (
        "times grad.x; the first bound that is too wide is that of the value at self_attn[0]: use float64, which is "
        "enough (--dtypes float64); or judge a smaller part" in message
    )


def test_parts_with_too_wide_bounds_are_tried_once_for_all_world_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[ModuleCase] = []
    require_bounds = candidates.require_bounds
    monkeypatch.setattr(candidates, "require_bounds", lambda case: (tried.append(case), require_bounds(case)))
    prop = module_property(HERE + "encoder_layer", HERE + "whole", ((1, 5, 4),), batch="whole")
    left_out = [prop.left_out(Space((size,), ("float64", "bfloat16"))).keys() for size in (1, 2, 3)]
    of_parts = [case.dtype for case in tried if case.judge.by_parts]

    assert left_out == [{"bfloat16"}] * 3
    assert of_parts == ["bfloat16"]


def test_refusal_names_a_smaller_shape_that_gives_a_conclusion() -> None:
    message = told("chaos", (4, 60, 2), "float64", step=STEP)

    assert "use x of shape (4, 1, 2) in float64, which is enough; or judge a smaller part" in message


def test_refusal_proposes_a_shape_with_a_row_for_each_micro_batch() -> None:
    sizes, inputs = {"batch": (8,), "place": (60,)}, {"input": real(("batch", "place", 2))}
    prop = module_property(
        HERE + "chaos", HERE + "whole", inputs=inputs, sizes=sizes, batch="parts of the whole", step=STEP,
        micro_batches=2,
    )  # fmt: skip
    with pytest.raises(Misuse, match=r"use input of shape \(8, 1, 2\) in float64, which is enough"):
        prop.cases(Space((2,), ("float64",)))


def test_refusal_of_an_update_smaller_than_its_bound_names_a_wider_dtype() -> None:
    message = told("perceptron", (2, 3), "float32", where=STEPS, optimizer=f"{STEPS}small_sgd")

    assert "so a missing update would not show: use float64, which is enough (--dtypes float64)" in message


@pytest.mark.parametrize("batch", ["whole", "parts of the whole"])
def test_refusal_of_a_whole_step_in_bfloat16_names_dtypes_that_are_enough(batch: str) -> None:
    message = told("squares", (2, 3), "bfloat16", where=STEPS, step=STEP, batch=batch, by_parts=False)

    assert message == (
        f"{STEPS}squares: by_parts=False judges a step as a whole, which needs float32 or float64, got bfloat16: use "
        "--dtypes float32,float64, which is enough; or leave by_parts out"
    )


def test_step_in_16_bits_is_judged_by_parts() -> None:
    prop = module_property(f"{STEPS}squares", HERE + "whole", [(2, 3)], batch="whole", step=STEP)

    assert prop.leaves_out is not None and prop.leaves_out(Space((1,), ("bfloat16", "float16"))) == {}


def test_updates_in_16_bits_of_a_divided_batch_are_judged_by_parts() -> None:
    prop = module_property(
        f"{STEPS}perceptron", f"{STEPS}columns_and_rows", [(2, 3)], batch="mean of parts", optimizer=f"{STEPS}large_sgd"
    )

    assert prop.leaves_out is not None and prop.leaves_out(Space((1,), ("bfloat16",))) == {}


def test_reason_for_omitting_bfloat16_names_dtypes_that_give_a_conclusion() -> None:
    prop = module_property(f"{STEPS}squares", HERE + "whole", [(2, 3)], batch="whole", step=STEP, by_parts=False)

    assert prop.leaves_out is not None
    assert "use --dtypes float32,float64" in prop.leaves_out(Space((1,), ("bfloat16",)))["bfloat16"]


def test_reason_of_an_inconclusive_case_names_a_remedy() -> None:
    case = ModuleCase(
        build=f"{STEPS}perceptron", parallelize=HERE + "whole", world_size=1, x_shape=(2, 3), values=(("real", 0),),
        optimizer=f"{STEPS}small_sgd",
    )  # fmt: skip

    assert "use float64, which is enough (--dtypes float64)" in reason_in(case)
    assert reason_in(replace(case, dtype="float64")) == ""
