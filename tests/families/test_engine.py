"""Cases of DeepSpeed's engine: what they allow, and what of them is drawn.  Nothing here needs DeepSpeed."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from equivtest.cases.values import draw
from equivtest.errors import Misuse
from equivtest.families.training.deepspeed.case import EVERYTHING, OF_STAGE_3, REDUCE_BUCKET_NUMEL, EngineCase
from equivtest.families.training.deepspeed.known import leaf_input_requires_grad
from equivtest.layout import Layout, Partial, Replicate, Shard
from equivtest.oracle import expect
from tests.drawing import run_of

SIZES = ("persistence_numel", "prefetch_numel", "reuse_numel", "live_numel", "reduce_bucket_numel")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("style", "ddp", "an engine must have style='zero3', got 'ddp'"),
        ("members", (1, 0), "leave members out"),
        ("dtype", "bfloat16", "only in float32, got 'bfloat16'"),
        ("persistence_numel", -1, "must be in 0.."),
        ("reduce_bucket_numel", 0, "must be in 1.."),
        ("clip_norm", 1.0, "clips by gradient_clipping"),
        ("stopped_steps", (2,), "leave stopped_steps out"),
        ("live_numel", EVERYTHING + 1, "got 1000000001"),
        ("gradient_clipping", -1.0, "at least 0 and finite"),
        ("gradient_clipping", 1.0, "before an update: set optimizer"),
        ("predivide_factor", 0.0, "above 0 and finite, got 0.0"),
        ("predivide_factor", 2.0, "stage 3 does not scale gradients that it reduces by reduce_scatter"),
        ("prescales", True, "set reduce_scatter=False"),
        ("saved_after", 1, "must be in 0..0, so that a step follows the checkpoint, got 1"),
    ],
)
def test_engine_case_refuses_impossible_fields(field: str, value: object, said: str) -> None:
    with pytest.raises(Misuse, match=said):
        EngineCase(**{"world_size": 2, field: value})  # type: ignore[arg-type]


def test_a_third_of_engine_cases_have_no_persistent_parameter() -> None:
    cases = run_of("deepspeed_mlp_all_gather")

    assert sum(case.persistence_numel == 0 for case in cases) > 0.3 * len(cases)
    assert any(0 < case.persistence_numel < EVERYTHING for case in cases)


@pytest.mark.parametrize("size", SIZES)
def test_drawn_engine_options_lie_just_below_at_and_above_a_parameters_numel(size: str) -> None:
    found = {getattr(case, size) - numel for case in run_of("deepspeed_mlp_all_gather") for numel in numels_of(case)}

    assert {-1, 0, 1} <= found


@pytest.mark.parametrize("field", ["reduce_scatter", "saved_after", "sequential", "leaf", "sub_group_numel"])
def test_unusual_options_of_an_engine_are_drawn_seldom(field: str) -> None:
    usual = getattr(EngineCase(world_size=1), field)
    values = [getattr(case, field) for case in run_of("deepspeed_mlp_all_gather")]
    share = sum(value != usual for value in values) / len(values)

    assert 0.03 < share < 0.5


def test_engine_cases_are_drawn_with_every_kind_of_predivide_factor() -> None:
    scaled = [case for case in run_of("deepspeed_mlp_all_gather") if not case.reduce_scatter]

    assert {case.predivide_factor for case in scaled} >= {0.5, 1.0, 2.0, 3.0}
    assert any(case.predivides and case.predivide_factor == case.world_size for case in scaled)
    assert {case.prescales for case in scaled} == {False, True}
    assert EngineCase(world_size=2, stage=1, predivide_factor=2.0).predivides


@pytest.mark.parametrize("factor", [0.5, 2.0, 3.0, 7.0])
@pytest.mark.parametrize("mode", ["dense", "real"])
def test_predivided_gradients_are_within_the_bound_and_exact_for_powers_of_two(factor: float, mode: str) -> None:
    """Multiplied by reciprocals, as in stages 1 and 2, or divided, as in stage 3."""
    case = EngineCase(
        world_size=3, leading=(4,), in_features=3, out_features=5, requires_grad=("out_proj.weight",),
        reduce_scatter=False, predivide_factor=factor, values=((mode, 0),),
    )  # fmt: skip
    expected = expect(case, 0).tensors
    right, hidden = expected["grad.out_proj.weight"], expected["capture.out_proj.input"].value.float()
    cotangents, hiddens = draw(case, 0)["cotangent"].chunk(3), hidden.chunk(3)
    parts = [cotangent.T @ own for cotangent, own in zip(cotangents, hiddens, strict=True)]
    by_products = (parts[0] * (1 / factor) + parts[1] * (1 / factor) + parts[2] * (1 / factor)) * (factor / 3)
    by_quotients = (parts[0] / factor / 3 + parts[1] / factor / 3 + parts[2] / factor / 3) * factor
    for found in (by_products, by_quotients):
        allowed = 0 if right.allowed is None else right.allowed
        assert bool(((found.double() - right.value).abs() <= allowed).all())
    assert (right.allowed is None) == (mode == "dense" and factor in (0.5, 2.0))


def test_engine_training_cases_run_three_or_four_steps() -> None:
    assert {case.steps for case in run_of("deepspeed_mlp_all_gather") if case.trains} == {3, 4}
    assert {case.steps for case in run_of("deepspeed_mlp_all_gather") if not case.trains} == {1}


def test_drawn_engine_cases_have_a_small_reduce_bucket() -> None:
    """DeepSpeed's own default takes 2 GB on every rank."""
    assert max(case.reduce_bucket_numel for case in run_of("deepspeed_mlp_all_gather")) == REDUCE_BUCKET_NUMEL


def test_predicate_leaf_input_requires_grad_is_false_only_for_leaf_modules() -> None:
    plain, leaf = EngineCase(world_size=1, requires_grad=("in_proj.weight",)), EngineCase(world_size=1, leaf=True)

    assert leaf_input_requires_grad(plain) and leaf_input_requires_grad(leaf)
    assert not leaf_input_requires_grad(EngineCase(world_size=1, requires_grad=("in_proj.weight",), leaf=True))


@pytest.mark.parametrize("name", OF_STAGE_3)
def test_engine_case_of_stage_2_refuses_options_for_divided_parameters(name: str) -> None:
    usual = getattr(EngineCase, name)

    with pytest.raises(Misuse, match=f"stage 2 divides no parameters: leave {name} out"):
        EngineCase(world_size=2, stage=2, **{name: 1 if usual in (0, EVERYTHING) else not usual})


@pytest.mark.parametrize("stage", [1, 2])
def test_layouts_of_stages_1_and_2_have_whole_parameters_and_partial_gradients_and_states(stage: int) -> None:
    case = EngineCase(world_size=3, stage=stage, optimizer="adamw", steps=2, biases=("in_proj",))
    layouts = case.layouts()
    whole, operand = Layout((Replicate(),)), Layout((Partial(),))

    assert {layouts[name] for name in layouts if ".param." in f".{name}"} == {whole}
    assert {layouts[name] for name in layouts if "exp_avg" in name or name.startswith("grad.in_proj.w")} == {operand}
    assert layouts["output"] == layouts["grad.x"] == layouts["capture.in_proj.output"] == Layout((Shard(0),))


def test_engine_cases_are_drawn_of_stage_1_and_of_stage_2() -> None:
    cases = run_of("deepspeed_mlp_stages_1_and_2")

    assert {case.stage for case in cases} == {1, 2}


def test_a_third_of_engine_training_cases_clip_gradients() -> None:
    trained = [case for case in run_of("deepspeed_mlp_all_gather") if case.trains]
    shares = [sum(case.gradient_clipping == limit for case in trained) / len(trained) for limit in (0.0, 2.0**12)]

    assert 0.3 < 1 - shares[0] < 0.75 and shares[1] > 0.03
    assert not any(case.gradient_clipping for case in run_of("deepspeed_mlp_all_gather") if not case.trains)


def test_code_of_an_engine_case_can_be_read_without_importing_a_property() -> None:
    program = "from equivtest.cases.case import from_code; print(type(from_code('EngineCase(world_size=1)')).__name__)"
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout

    assert shown == "EngineCase\n"


def numels_of(case: EngineCase) -> set[int]:
    return {math.prod(case.shapes()[f"param.{name}"]) for name in case.parameter_names()}
