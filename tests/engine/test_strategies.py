"""Draws of strategies: how varied, how small at the end, and the same in every process."""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from equivtest.base import limits
from equivtest.cases import drawing
from equivtest.cases.parts import modules_of
from equivtest.families.linear.case import REAL_MODES, LinearCase
from equivtest.families.training.case import CHECKPOINTS
from equivtest.families.training.sequence.case import MlpCase
from equivtest.families.training.sequence.known import hidden_is_uneven
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.families.zero3.fetch.strategy import fetch_cases
from equivtest.layout import shard_kind
from equivtest.property import Space
from tests.drawing import SPACE, STRATEGIES, drawn, run_of, smallest

DATA_PARALLEL = ("ddp_mlp", "fsdp2_mlp", "zero3_mlp_all_gather", "fsdp2_tp_mlp", "hsdp_mlp")


@pytest.mark.parametrize(
    ("name", "num_draws"),
    [
        ("colwise_linear", 4),
        ("rowwise_linear", 4),
        ("deepspeed_fetch_all_gather", 4),
        ("sequence_parallel_mlp", 2),
        ("sequence_parallel_mlp_trains", 2),
        ("ddp_mlp", 2),
    ],
)
def test_most_cases_have_several_draws(name: str, num_draws: int) -> None:
    cases = run_of(name)

    assert sum(len(case.values) >= num_draws for case in cases) > 0.6 * len(cases)


@pytest.mark.parametrize("name", ["colwise_linear", "rowwise_linear"])
def test_over_a_third_of_linear_draws_have_real_values(name: str) -> None:
    modes = Counter((case.world_size, mode) for case in run_of(name) for mode, _ in case.values)
    real = {key: count for key, count in modes.items() if key[1] in REAL_MODES}

    assert len(real) == len(limits.WORLD_SIZES) * len(REAL_MODES)
    assert sum(real.values()) > 0.36 * modes.total()


LINEAR_KINDS: dict[str, Callable[[LinearCase], object]] = {
    "number of leading dims": lambda case: len(case.leading),
    "bias": lambda case: case.bias,
    "poison": lambda case: case.poison,
    "repeats": lambda case: case.repeats,
    "input layout": lambda case: case.input_layout,
    "output layout": lambda case: case.output_layout,
    "x is a DTensor": lambda case: case.x_is_dtensor,
    "local output": lambda case: case.use_local_output,
    "x contiguous": lambda case: case.x_contiguous,
    "cotangent contiguous": lambda case: case.cotangent_contiguous,
    "requires_grad": lambda case: case.requires_grad,
    "fewer features than ranks": lambda case: case.in_features < case.world_size,
    "a feature beside a multiple of the world size": lambda case: case.in_features % case.world_size == 1,
    "a size at a tile's edge": lambda case: case.out_features in (31, 32, 33),
}
LINEAR_VALUES = {"number of leading dims": 4, "poison": 3, "input layout": 5, "output layout": 5, "requires_grad": 8}


@pytest.mark.parametrize("style", ["colwise", "rowwise"])
@pytest.mark.parametrize("axis", LINEAR_KINDS)
def test_linear_cases_take_every_value_of_each_field(axis: str, style: str) -> None:
    values = {LINEAR_KINDS[axis](case) for case in run_of(f"{style}_linear")}

    assert len(values) == LINEAR_VALUES.get(axis, 2), values


MLP_KINDS: dict[str, Callable[[MlpCase], object]] = {
    "number of leading dims": lambda case: len(case.leading),
    "sequence dim": lambda case: case.sequence_dim,
    "biases": lambda case: case.biases,
    "activation": lambda case: case.activation,
    "x is a DTensor": lambda case: case.x_is_dtensor,
    "local hidden, uneven": lambda case: (case.use_local_output, hidden_is_uneven(case)),
    "uneven sequence": lambda case: case.sequence_is_uneven,
    "x contiguous": lambda case: case.x_contiguous,
    "cotangent contiguous": lambda case: case.cotangent_contiguous,
    "fewer hidden features than ranks": lambda case: case.hidden_features < case.world_size,
    "modes": lambda case: len({mode for mode, _ in case.values}),
}
TRAINING_KINDS: dict[str, Callable[[MlpCase], object]] = {
    "optimizer": lambda case: case.optimizer,
    "steps": lambda case: case.steps,
    "momentum": lambda case: case.momentum,
    "weight decay": lambda case: case.weight_decay,
    "foreach": lambda case: case.foreach,
    "learning rate": lambda case: case.lr,
}
MLP_VALUES = {"number of leading dims": 3, "sequence dim": 3, "biases": 4, "activation": 3, "local hidden, uneven": 4,
              "modes": 2, "momentum": 3, "weight decay": 4, "learning rate": 4}  # fmt: skip


@pytest.mark.parametrize("axis", MLP_KINDS)
def test_perceptron_cases_take_every_value_of_each_field(axis: str) -> None:
    values = {MLP_KINDS[axis](case) for case in run_of("sequence_parallel_mlp")}

    assert len(values) >= MLP_VALUES.get(axis, 2), values


@pytest.mark.parametrize("axis", TRAINING_KINDS)
def test_training_cases_take_every_value_of_each_field(axis: str) -> None:
    values = {TRAINING_KINDS[axis](case) for case in run_of("sequence_parallel_mlp_trains")}

    assert len(values) == MLP_VALUES.get(axis, 2), values


def test_every_training_case_updates_a_parameter_and_none_uses_adamw_in_float16() -> None:
    for case in run_of("sequence_parallel_mlp_trains"):
        assert case.trains and case.trained_names()
        assert (case.optimizer, case.dtype) != ("adamw", "float16")


@pytest.mark.parametrize("name", DATA_PARALLEL)
def test_some_data_parallel_training_has_a_step_that_leaves_in_proj_unused(name: str) -> None:
    trained = [case for case in run_of(name) if case.trains]

    assert len(trained) / 20 < sum(bool(case.stopped_steps) for case in trained) < len(trained) / 2


@pytest.mark.parametrize("name", DATA_PARALLEL)
def test_a_third_of_data_parallel_training_cases_clip_gradients(name: str) -> None:
    trained = [case for case in run_of(name) if case.trains]
    clipping = [case for case in trained if case.clips]

    assert len(trained) / 3 < len(clipping) < 2 * len(trained) / 3
    assert {case.norm_type for case in clipping} == {"1", "2", "inf"}


@pytest.mark.parametrize("name", DATA_PARALLEL)
def test_at_least_a_third_of_data_parallel_cases_recompute_activations(name: str) -> None:
    counts = Counter(case.checkpointed for case in run_of(name))

    assert counts.keys() == set(CHECKPOINTS)
    assert counts.total() / 3 < counts.total() - counts[""] < 2 * counts.total() / 3


@pytest.mark.parametrize("name", ["fsdp2_mlp", "hsdp_mlp"])
def test_some_sharded_cases_shard_one_or_two_weights_on_dim_1(name: str) -> None:
    counts = Counter(case.by_columns for case in run_of(name) if not case.tied)
    weights = ("in_proj.weight", "out_proj.weight")

    assert counts.keys() == {(), weights, weights[:1], weights[1:]}
    assert counts.total() / 6 < counts.total() - counts[()] < 2 * counts.total() / 3


def test_over_half_of_the_perceptron_cases_with_a_local_hidden_tensor_have_even_shards() -> None:
    local = [case for case in run_of("sequence_parallel_mlp") if case.use_local_output]

    assert sum(not hidden_is_uneven(case) for case in local) > 0.5 * len(local)


FETCH_KINDS: dict[str, Callable[[FetchCase], bool]] = {
    "a single parameter": lambda case: len(case.parameters) == 1,
    "five parameters": lambda case: len(case.parameters) == 5,
    "a 0-dim parameter": lambda case: () in case.parameters,
    "a 4-D parameter": lambda case: any(len(shape) == 4 for shape in case.parameters),
    "no elements": lambda case: any(0 in shape for shape in case.parameters),
    "fewer elements than ranks": lambda case: any(0 < math.prod(s) < case.world_size for s in case.parameters),
    "one element too many": lambda case: any(math.prod(s) % case.world_size == 1 for s in case.parameters),
    "one element too few": lambda case: any(-math.prod(s) % case.world_size == 1 for s in case.parameters),
    "both flags": lambda case: len(set(case.requires_grad)) == 2,
    "nan padding": lambda case: case.padding == "nan",
    "not contiguous": lambda case: not case.contiguous,
    "memory of large numbers": lambda case: case.poison == "large",
    "memory of nan": lambda case: case.poison == "nan",
    "memory as it was": lambda case: case.poison == "none",
    "repeats": lambda case: case.repeats,
}


@pytest.mark.parametrize("kind", FETCH_KINDS)
def test_fetch_cases_are_drawn_with_and_without_each_listed_feature(kind: str) -> None:
    assert {bool(FETCH_KINDS[kind](case)) for case in run_of("deepspeed_fetch_all_gather")} == {True, False}


def test_over_a_third_of_the_draws_of_fetch_cases_have_special_values() -> None:
    modes = Counter(mode for case in run_of("deepspeed_fetch_all_gather") for mode, _ in case.values)

    assert 0.35 * modes.total() < modes["special"] < 0.45 * modes.total(), modes


def test_repeated_fetch_cases_have_an_odd_number_of_draws() -> None:
    """So that what alternates from call to call is in its other state when draw 0 comes again."""
    assert {len(case.values) % 2 for case in run_of("deepspeed_fetch_all_gather") if case.repeats} == {1}


@pytest.mark.parametrize("style", ["colwise", "rowwise"])
def test_sums_stay_short_enough_for_exact_values_in_bfloat16(style: str) -> None:
    for case in run_of(f"{style}_linear"):
        assert math.prod(case.leading) <= 99
        assert max(case.in_features, case.out_features) <= 33


@pytest.mark.parametrize("name", ["colwise_linear", "rowwise_linear"])
def test_about_one_fetch_case_in_eight_records_collectives(name: str) -> None:
    cases = run_of(name)

    assert len(cases) / 16 < sum(case.records for case in cases) < len(cases) / 4


def test_fetch_case_records_collectives_only_if_it_names_a_collective() -> None:
    named = drawn(fetch_cases(SPACE, collective="all_reduce"), 60)

    assert {case.collective for case in named} == {"all_reduce"} and any(case.records for case in named)
    assert not any(case.records for case in run_of("deepspeed_fetch_all_gather"))


def test_mesh_of_part_of_the_processes_shrinks_to_the_second_process_alone() -> None:
    assert smallest(fetch_cases(SPACE), lambda case: bool(case.members)) == FetchCase(world_size=1, members=(1,))


def test_mesh_of_six_ranks_has_all_processes_in_order_or_reversed() -> None:
    cases = drawn(STRATEGIES["deepspeed_fetch_all_gather"](Space((6,), limits.DTYPES)), 40)

    assert {case.members for case in cases} == {(), (5, 4, 3, 2, 1, 0)}


@pytest.mark.parametrize("style", ["colwise", "rowwise"])
def test_linear_case_with_uneven_shards_of_x_passes_x_as_a_dtensor(style: str) -> None:
    uneven = [
        case
        for case in run_of(f"{style}_linear")
        if shard_kind(case.shapes()["x"], case.layouts()["x"], case.mesh_shape) != "even"
    ]

    assert uneven
    assert all(case.x_is_dtensor for case in uneven)


def test_linear_case_with_wrong_in_features_has_a_replicated_plain_x() -> None:
    """Not hidden in the shards of some ranks, nor by a DTensor that states the right shape."""
    for case in run_of("rowwise_linear_refuses"):
        if case.misfit == "in_features":
            assert (case.input_layout, case.x_is_dtensor) == ("replicate", False)


def test_uneven_shard_shrinks_to_one_feature_over_two_ranks() -> None:
    case = smallest(STRATEGIES["rowwise_linear"](SPACE), lambda case: case.shard_kind != "even")

    assert case == LinearCase(world_size=2, style="rowwise")


def test_case_shrinks_to_the_one_draw_whose_mode_fails() -> None:
    case = smallest(STRATEGIES["colwise_linear"](SPACE), lambda case: any(mode == "wide-w" for mode, _ in case.values))

    assert case == LinearCase(world_size=1, style="colwise", values=(("wide-w", 0),))


def test_large_size_shrinks_to_the_smallest_size_that_fails() -> None:
    case = smallest(STRATEGIES["rowwise_linear"](SPACE), lambda case: case.world_size > 2 and case.in_features > 3)

    assert case == LinearCase(world_size=3, style="rowwise", in_features=4)


def test_case_shrinks_to_the_one_parameter_that_fails() -> None:
    case = smallest(
        STRATEGIES["deepspeed_fetch_all_gather"](SPACE), lambda case: any(0 in shape for shape in case.parameters)
    )

    assert case == FetchCase(world_size=1, parameters=((0,),))


def test_strategies_use_only_hypothesis_functions_that_draw_from_tables() -> None:
    trees = [ast.parse(Path(module.__file__ or "").read_text()) for module in (drawing, *modules_of("strategy"))]
    used = {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "st"
    }

    assert used == {"composite", "sampled_from"}
