"""What strategies draw: how varied, how small at the end, and the same in every process."""

from __future__ import annotations

import ast
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from equivtest import limits
from equivtest.families.collectives.case import CollectivesCase
from equivtest.families.cross_entropy.case import CrossEntropyCase, RefusedCrossEntropyCase
from equivtest.families.cross_entropy.gathered.case import GatheredCrossEntropyCase, RefusedGatheredCrossEntropyCase
from equivtest.families.dropout.case import DropoutCase
from equivtest.families.embedding.case import EmbeddingCase, RefusedEmbeddingCase
from equivtest.families.embedding.ways.case import EmbeddingWaysCase
from equivtest.families.linear.case import REAL_MODES, LinearCase, RefusedLinearCase
from equivtest.families.module.case import ModuleCase
from equivtest.families.norm.case import NormCase
from equivtest.families.operators.case import OperatorCase
from equivtest.families.redistribute.case import RedistributeCase
from equivtest.families.redistribute.case_refused import RefusedRedistributeCase
from equivtest.families.redistribute.prepared.case import PreparedCase
from equivtest.families.reduction.case import ReductionCase
from equivtest.families.training.case import CHECKPOINTS
from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.families.training.data_parallel.case_refused import RefusedShardingCase
from equivtest.families.training.sequence.case import MlpCase
from equivtest.families.training.two_axes.case import TwoAxisCase
from equivtest.families.zero3.fetch.case import FetchCase, RefusedFetchCase
from equivtest.families.zero3.fetch.strategy import fetch_cases
from equivtest.families.zero3.lifecycle.case import LifecycleCase
from equivtest.kit import picks
from equivtest.kit.case import Case
from equivtest.kit.parts import modules_of
from equivtest.layout import shard_kind
from equivtest.property import Space
from tests.drawing import SPACE, STRATEGIES, drawn, smallest

WITHIN_CONTRACT = (
    *("colwise", "rowwise", "fetch", "lifecycle", "mlp", "training", "fsdp2", "zero3", "fsdp2_tp", "hsdp"),
    *("colwise embedding", "rowwise embedding", "layer_norm", "rms_norm", "redistribute"),
    *("cross entropy", "reduction", "prepared", "dropout", "gathered cross entropy"),
)
TWO_AXES = ("fsdp2_tp", "hsdp")  # members go with a mesh of one axis
ROOT = Path(__file__).parents[1]


@cache
def run_of(name: str) -> tuple[Any, ...]:
    """The 240 cases of a whole run: one search, from a seed of its own, for each world size."""
    spaces = {world_size: Space((world_size,), limits.DTYPES) for world_size in limits.WORLD_SIZES}
    return tuple(case for number, space in spaces.items() for case in drawn(STRATEGIES[name](space), 60, number=number))


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_dtype_is_at_least_15_percent_of_a_run(name: str) -> None:
    counts = Counter(case.dtype for case in run_of(name))

    assert counts.keys() == set(limits.DTYPES)
    assert min(counts.values()) >= 0.15 * counts.total(), counts


@pytest.mark.parametrize("name", WITHIN_CONTRACT)
def test_over_half_of_a_run_is_uneven_or_empty(name: str) -> None:
    counts = Counter(case.shard_kind for case in run_of(name))

    assert counts["uneven"] + counts["empty"] > 0.5 * counts.total(), counts


@pytest.mark.parametrize("name", WITHIN_CONTRACT)
def test_every_world_size_above_one_has_shards_of_every_kind(name: str) -> None:
    kinds = Counter((case.world_size, case.shard_kind) for case in run_of(name))

    assert {key for key in kinds if key[0] > 1} == {
        (w, kind) for w in (2, 3, 4) for kind in ("even", "uneven", "empty")
    }


@pytest.mark.parametrize(
    ("name", "num_draws"), [("colwise", 4), ("rowwise", 4), ("fetch", 4), ("mlp", 2), ("training", 2), ("ddp", 2)]
)
def test_most_cases_carry_several_draws_of_values(name: str, num_draws: int) -> None:
    cases = run_of(name)

    assert sum(len(case.values) >= num_draws for case in cases) > 0.6 * len(cases)


@pytest.mark.parametrize("name", ["colwise", "rowwise"])
def test_of_the_draws_of_linear_layers_over_a_third_are_real(name: str) -> None:
    """And some of every kind of real values in every world."""
    modes = Counter((case.world_size, mode) for case in run_of(name) for mode, _ in case.values)
    real = {key: count for key, count in modes.items() if key[1] in REAL_MODES}

    assert len(real) == len(limits.WORLD_SIZES) * len(REAL_MODES)
    assert sum(real.values()) > 0.36 * modes.total()


@pytest.mark.parametrize("name", WITHIN_CONTRACT)
def test_hardly_any_case_is_drawn_twice(name: str) -> None:
    """Nor are neighbours copies of one another with one draw repeated, as Hypothesis likes to make them."""
    cases = run_of(name)
    neighbours = list(pairwise(cases))

    assert len(set(cases)) >= 0.95 * len(cases)
    assert sum(a.dtype == b.dtype for a, b in neighbours) < 0.4 * len(neighbours)


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
def test_a_run_of_linear_cases_takes_every_value_of(axis: str, style: str) -> None:
    values = {LINEAR_KINDS[axis](case) for case in run_of(style)}

    assert len(values) == LINEAR_VALUES.get(axis, 2), values


MLP_KINDS: dict[str, Callable[[MlpCase], object]] = {
    "number of leading dims": lambda case: len(case.leading),
    "sequence dim": lambda case: case.sequence_dim,
    "biases": lambda case: case.biases,
    "activation": lambda case: case.activation,
    "x is a DTensor": lambda case: case.x_is_dtensor,
    "local hidden, uneven": lambda case: (case.use_local_output, case.hidden_is_uneven),
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
def test_a_run_of_perceptrons_takes_every_value_of(axis: str) -> None:
    values = {MLP_KINDS[axis](case) for case in run_of("mlp")}

    assert len(values) >= MLP_VALUES.get(axis, 2), values


@pytest.mark.parametrize("axis", TRAINING_KINDS)
def test_a_run_of_training_takes_every_value_of(axis: str) -> None:
    values = {TRAINING_KINDS[axis](case) for case in run_of("training")}

    assert len(values) == MLP_VALUES.get(axis, 2), values


def test_every_training_case_updates_a_parameter_and_adamw_is_not_drawn_in_float16() -> None:
    for case in run_of("training"):
        assert case.trains and case.trained_names()
        assert (case.optimizer, case.dtype) != ("adamw", "float16")


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero3", "fsdp2_tp", "hsdp"])
def test_some_data_parallel_training_has_a_step_that_leaves_in_proj_unused(name: str) -> None:
    trained = [case for case in run_of(name) if case.trains]

    assert len(trained) / 20 < sum(bool(case.stopped_steps) for case in trained) < len(trained) / 2


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero3", "fsdp2_tp", "hsdp"])
def test_of_data_parallel_training_a_third_or_more_clips_by_each_kind_of_norm(name: str) -> None:
    trained = [case for case in run_of(name) if case.trains]
    clipping = [case for case in trained if case.clips]

    assert len(trained) / 3 < len(clipping) < 2 * len(trained) / 3
    assert {case.norm_type for case in clipping} == {"1", "2", "inf"}


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero3", "fsdp2_tp", "hsdp"])
def test_a_third_or_more_of_data_parallel_cases_computes_something_again(name: str) -> None:
    counts = Counter(case.checkpointed for case in run_of(name))

    assert counts.keys() == set(CHECKPOINTS)
    assert counts.total() / 3 < counts.total() - counts[""] < 2 * counts.total() / 3


@pytest.mark.parametrize("name", ["fsdp2", "hsdp"])
def test_in_some_sharded_cases_each_weight_or_both_are_sharded_on_dim_1(name: str) -> None:
    counts = Counter(case.by_columns for case in run_of(name) if not case.tied)
    weights = ("in_proj.weight", "out_proj.weight")

    assert counts.keys() == {(), weights, weights[:1], weights[1:]}
    assert counts.total() / 6 < counts.total() - counts[()] < 2 * counts.total() / 3


def test_over_half_of_the_perceptrons_with_a_local_hidden_activation_are_even_and_so_run() -> None:
    local = [case for case in run_of("mlp") if case.use_local_output]

    assert sum(not case.hidden_is_uneven for case in local) > 0.5 * len(local)


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
def test_a_run_of_fetch_cases_has_some_with_and_some_without(kind: str) -> None:
    assert {bool(FETCH_KINDS[kind](case)) for case in run_of("fetch")} == {True, False}


def test_over_a_third_of_the_draws_of_fetches_are_special() -> None:
    modes = Counter(mode for case in run_of("fetch") for mode, _ in case.values)

    assert 0.35 * modes.total() < modes["special"] < 0.45 * modes.total(), modes


def test_fetches_that_repeat_have_an_odd_number_of_draws() -> None:
    """So that what alternates from call to call is in its other state when draw 0 comes again."""
    assert {len(case.values) % 2 for case in run_of("fetch") if case.repeats} == {1}


@pytest.mark.parametrize("style", ["colwise", "rowwise"])
def test_sums_stay_short_enough_for_exact_values_in_bfloat16(style: str) -> None:
    for case in run_of(style):
        assert math.prod(case.leading) <= 99
        assert max(case.in_features, case.out_features) <= 33


@pytest.mark.parametrize("name", [name for name in WITHIN_CONTRACT if name not in TWO_AXES])
def test_about_one_case_in_six_runs_on_a_mesh_within_a_larger_world(name: str) -> None:
    """Of at most four processes; some meshes are not ascending, some leave processes out."""
    cases = run_of(name)
    within = [case for case in cases if case.members]

    assert len(cases) / 12 < len(within) < len(cases) / 4
    assert max(case.num_processes for case in cases) == 4
    assert any(list(case.members) != sorted(case.members) for case in within)
    assert any(len(case.groups) * case.world_size < case.num_processes for case in within)
    assert any(len(case.groups) > 1 for case in within)


@pytest.mark.parametrize("name", ["colwise", "rowwise"])
def test_about_one_case_in_eight_is_recorded(name: str) -> None:
    cases = run_of(name)

    assert len(cases) / 16 < sum(case.records for case in cases) < len(cases) / 4


def test_a_fetch_is_recorded_where_its_collective_is_named() -> None:
    """Of an unnamed one nothing is documented."""
    named = drawn(fetch_cases(SPACE, collective="all_reduce"), 60)

    assert {case.collective for case in named} == {"all_reduce"} and any(case.records for case in named)
    assert not any(case.records for case in run_of("fetch"))


def test_a_mesh_within_a_larger_world_shrinks_to_one_rank_in_the_second_process() -> None:
    assert smallest(STRATEGIES["fetch"](SPACE), lambda case: bool(case.members)) == FetchCase(
        world_size=1, members=(1,)
    )


def test_a_world_beyond_the_table_is_turned_around() -> None:
    """No process is left out there: a soak has worlds of up to eight."""
    cases = drawn(STRATEGIES["fetch"](Space((6,), limits.DTYPES)), 40)

    assert {case.members for case in cases} == {(), (5, 4, 3, 2, 1, 0)}


@pytest.mark.parametrize("style", ["colwise", "rowwise"])
def test_x_is_a_dtensor_where_its_shards_are_uneven(style: str) -> None:
    uneven = [
        case for case in run_of(style) if shard_kind(case.shapes()["x"], case.layouts()["x"], case.mesh_shape) != "even"
    ]

    assert uneven
    assert all(case.x_is_dtensor for case in uneven)


@pytest.mark.parametrize("name", STRATEGIES)
def test_only_the_space_that_was_asked_for_is_drawn(name: str) -> None:
    cases = drawn(STRATEGIES[name](Space((5, 16), ("float16",))), 30)

    assert {case.world_size for case in cases} == {5, 16}
    assert {case.dtype for case in cases} == {"float16"}


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_largest_world_has_valid_cases_too(name: str) -> None:
    assert drawn(STRATEGIES[name](Space((limits.MAX_WORLD_SIZE,), ("bfloat16",))), 30)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_case_is_outside_the_contract_only_where_asked_for(name: str) -> None:
    assert {bool(case.refusal) for case in drawn(STRATEGIES[name](SPACE), 30)} == {name.startswith("refused")}


def test_a_feature_too_many_is_seen_by_every_rank() -> None:
    """Not hidden in the shards of some ranks, nor by a DTensor that states the right shape."""
    for case in run_of("refused rowwise"):
        if case.misfit == "in_features":
            assert (case.input_layout, case.x_is_dtensor) == ("replicate", False)


SIMPLEST: dict[str, Case] = {
    "colwise": LinearCase(world_size=1, style="colwise"),
    "rowwise": LinearCase(world_size=1, style="rowwise"),
    "collectives": CollectivesCase(world_size=1),
    "fetch": FetchCase(world_size=1),
    "lifecycle": LifecycleCase(world_size=1),
    "mlp": MlpCase(world_size=1),
    "training": MlpCase(world_size=1, optimizer="sgd", steps=2),
    "ddp": DataParallelCase(world_size=1),
    "fsdp2": DataParallelCase(world_size=1, style="fsdp2"),
    "zero3": DataParallelCase(world_size=1, style="zero3", fetch="all_gather"),
    "fsdp2_tp": TwoAxisCase(world_size=1),
    "hsdp": TwoAxisCase(world_size=1, style="hsdp"),
    "colwise embedding": EmbeddingCase(world_size=1, style="colwise"),
    "rowwise embedding": EmbeddingCase(world_size=1, style="rowwise"),
    "operators": OperatorCase(world_size=1, operator="abs", requires_grad=(0,)),
    "module": ModuleCase(world_size=1, build="torch.nn:Identity", parallelize="mine:whole"),
    "divided module": ModuleCase(
        world_size=1, build="torch.nn:Identity", parallelize="mine:whole", batch="mean of parts"
    ),
    "embedding ways": EmbeddingWaysCase(world_size=1),
    "layer_norm": NormCase(world_size=1, norm="layer_norm"),
    "rms_norm": NormCase(world_size=1, norm="rms_norm"),
    "cross entropy": CrossEntropyCase(world_size=1),
    "dropout": DropoutCase(world_size=1),
    "gathered cross entropy": GatheredCrossEntropyCase(world_size=1),
    "refused gathered cross entropy": RefusedGatheredCrossEntropyCase(world_size=1),
    "reduction": ReductionCase(world_size=1),
    "prepared": PreparedCase(world_size=1),
    "redistribute": RedistributeCase(world_size=1),
    "refused colwise embedding": RefusedEmbeddingCase(world_size=1, style="colwise"),
    "refused rowwise embedding": RefusedEmbeddingCase(world_size=1, style="rowwise"),
    "refused cross entropy": RefusedCrossEntropyCase(world_size=1),
    "refused colwise": RefusedLinearCase(world_size=1, style="colwise"),
    "refused rowwise": RefusedLinearCase(world_size=1, style="rowwise"),
    "refused redistribute": RefusedRedistributeCase(world_size=1),
    "refused sharding": RefusedShardingCase(world_size=1),
    "refused fetch": RefusedFetchCase(world_size=1, parameters=((1,), (1,)), requires_grad=(True, True)),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_simplest_case_is_that_of_all_defaults(name: str) -> None:
    assert smallest(STRATEGIES[name](SPACE)) == SIMPLEST[name]


def test_an_uneven_shard_shrinks_to_one_feature_over_two_ranks() -> None:
    case = smallest(STRATEGIES["rowwise"](SPACE), lambda case: case.shard_kind != "even")

    assert case == LinearCase(world_size=2, style="rowwise")


def test_a_mode_shrinks_to_one_draw_of_it() -> None:
    case = smallest(STRATEGIES["colwise"](SPACE), lambda case: any(mode == "wide-w" for mode, _ in case.values))

    assert case == LinearCase(world_size=1, style="colwise", values=(("wide-w", 0),))


def test_a_large_size_shrinks_to_the_nearest_edge() -> None:
    case = smallest(STRATEGIES["rowwise"](SPACE), lambda case: case.world_size > 2 and case.in_features > 3)

    assert case == LinearCase(world_size=3, style="rowwise", in_features=4)


def test_a_failing_parameter_shrinks_to_itself_alone() -> None:
    case = smallest(STRATEGIES["fetch"](SPACE), lambda case: any(0 in shape for shape in case.parameters))

    assert case == FetchCase(world_size=1, parameters=((0,),))


DRAWING = """
import sys
sys.path.insert(0, {folder!r})
if {name!r}:
    __import__({name!r})
from hypothesis.strategies import integers
from tests.drawing import SPACE, STRATEGIES, drawn
print("integers", drawn(integers(), 200))
for strategy in STRATEGIES.values():
    for case in drawn(strategy(SPACE), 25, number=11):
        print(case)
"""


def drawn_by_a_process(folder: Path, imported: str, hash_seed: str) -> tuple[str, list[str]]:
    """What a fresh process draws after it has imported a module: integers, and cases."""
    code = DRAWING.format(folder=str(folder), name=imported)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    integers, *cases = done.stdout.splitlines()
    return integers, cases


def test_draws_do_not_depend_on_what_else_is_imported(tmp_path: Path) -> None:
    """Hypothesis' own integers do: they draw the constants of that module too."""
    constants = [f"A{n} = {n}; B{n} = {10_007 * n}; S{n} = 'shard({n})'" for n in range(100)]
    (tmp_path / "full_of_constants.py").write_text("\n".join(constants))

    integers_alone, cases_alone = drawn_by_a_process(tmp_path, "", "1")
    integers_crowded, cases_crowded = drawn_by_a_process(tmp_path, "full_of_constants", "2")

    assert len(cases_alone) == 25 * len(STRATEGIES)
    assert cases_alone == cases_crowded
    assert integers_alone != integers_crowded


def test_strategies_draw_from_tables_only() -> None:
    trees = [ast.parse(Path(module.__file__ or "").read_text()) for module in (picks, *modules_of("strategy"))]
    used = {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "st"
    }

    assert used == {"composite", "sampled_from"}
