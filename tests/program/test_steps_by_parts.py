"""Steps on a deep model: recorded tensors within the model make the bounds narrow, and are not judged themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import find

from equivtest.module import ids, module_property, targets
from equivtest.programs.case import PARTS_OF_WHOLE, WHOLE, ModuleCase
from equivtest.property import Space
from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import judge

HERE = "tests.programs.deep_steps:"
STEP = f"{HERE}run_"
INPUTS = (("ids", "ids(7)", ("batch", "seq")), ("targets", "targets(7, -100)", ("batch", "seq")))


def stepped(step: str, parallelize: str = f"{HERE}replicated", **fields: Any) -> ModuleCase:
    made: dict[str, Any] = {
        "world_size": 2, "build": f"{HERE}deep", "inputs": INPUTS, "sizes": (("batch", 4), ("seq", 3)), "steps": 2,
        "batch": PARTS_OF_WHOLE, "optimizer": f"{HERE}sgd", "micro_batches": 2, "by_parts": True,
        "values": (("real", 1),),
    }  # fmt: skip
    return ModuleCase(step=step if ":" in step else STEP + step, parallelize=parallelize, **{**made, **fields})


def kinds(case: ModuleCase, pool: Pool) -> dict[str, str]:
    return {verdict.claim: verdict.kind for verdict in judge("module", case, pool)}


RIGHT_STEPS = {
    "replicated": stepped("Step"),
    "one rank": stepped("Step", world_size=1),
    "fully sharded": stepped("Step", "equivtest.programs.examples.plans:fully_sharded"),
    "tensor parallel": stepped("Whole", f"{HERE}hidden_divided", batch=WHOLE),
    "warmed up": stepped("WarmedUp"),
    "reversed": stepped("Reversed"),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in RIGHT_STEPS), ("fully sharded", "bfloat16"), ("tensor parallel", "bfloat16")],
)
def test_right_step_of_a_deep_model_passes(pool: Pool, name: str, dtype: str) -> None:
    case = replace(RIGHT_STEPS[name], dtype=dtype)

    assert set(kinds(case, pool).values()) == {"holds"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "wrong",
    [
        "MeanOfMeans", "FirstReduced", "NeverReduced", "DividedTwice", "RanksForgotten", "LastDropped",
        "scaled_in_one_layer", "norm_wrong_in_one_layer",
    ],
)  # fmt: skip
def test_wrong_step_of_a_deep_model_is_rejected_in_bfloat16(pool: Pool, wrong: str) -> None:
    step, parallelize = ("Step", wrong) if wrong[0].islower() else (wrong, "replicated")
    case = stepped(step, f"{HERE}{parallelize}", dtype="bfloat16", steps=1)

    assert kinds(case, pool)["gradients_equal_unsharded"] == "value"


@pytest.mark.ranks
def test_sum_over_micro_batches_may_overflow_before_a_pipeline_divides_it(pool: Pool) -> None:
    """The sum of eight gradients in float16 is infinite on the way to a mean of 7352."""
    plan = "equivtest.programs.examples.pipeline_plan:"
    case = ModuleCase(
        world_size=2, dtype="float16", values=(("real", 39),), optimizer="equivtest.programs.examples.mixture:sgd",
        step=f"{plan}scheduled", steps=2, build="equivtest.programs.examples.pipeline:chain(takes_mean=True)",
        parallelize=f"{plan}pipelined(infers=False, schedule='GPipe')", by_parts=True,
        inputs=(("x", "real", ("batch", 2)), ("weights", "real", ("batch", 2))), sizes=(("batch", 8),),
    )  # fmt: skip

    assert kinds(case, pool)["trains_like_unsharded"] == "inconclusive"


@pytest.mark.ranks
def test_wrong_step_of_tensor_parallel_layers_is_rejected(pool: Pool) -> None:
    case = stepped("WholeTooSmall", f"{HERE}hidden_divided", batch=WHOLE, dtype="bfloat16", steps=1)

    assert kinds(case, pool)["gradients_equal_unsharded"] == "value"


@pytest.mark.ranks
@pytest.mark.parametrize("wrong", ["MeanOfMeans", "FirstReduced", "DividedTwice", "LastDropped", "OwnReported"])
def test_step_rejected_as_a_whole_is_rejected_by_parts(pool: Pool, wrong: str) -> None:
    case = stepped(
        f"tests.programs.wrong_steps:run_{wrong}", build="equivtest.programs.examples.next_token:next_token",
        optimizer="equivtest.programs.examples.token_mean:adamw", max_norm=0.5, values=(("real", 2),), steps=1,
    )  # fmt: skip
    as_a_whole = kinds(replace(case, by_parts=False), pool)

    assert "value" in as_a_whole.values()
    assert kinds(case, pool) == as_a_whole


@pytest.mark.ranks
def test_step_that_calls_the_module_once_more_is_not_rejected_by_parts(pool: Pool) -> None:
    found = kinds(stepped("OnceMore", steps=1), pool)
    of_wrong = kinds(stepped("OnceMoreTooSmall", steps=1), pool)

    assert "value" not in found.values()
    assert of_wrong["gradients_equal_unsharded"] == "inconclusive"


def test_property_of_a_deep_model_judges_steps_by_parts_by_default() -> None:
    inputs = {"ids": ids(7, ("batch", "seq")), "targets": targets(7, ("batch", "seq"))}
    prop = module_property(
        f"{HERE}deep", f"{HERE}replicated", inputs=inputs, sizes={"batch": (4,), "seq": (3,)},
        optimizer=f"{HERE}sgd", step=f"{STEP}Step", batch=PARTS_OF_WHOLE,
    )  # fmt: skip

    assert find(prop.cases(Space((1,), ("float32",))), lambda case: True).judge.by_parts
