"""Common requirements of all families: strategies and cases, oracle against torch's unsharded run, replay files.

The strategies are those of the shipped properties; each test's id begins with the family's name.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from equivtest.base import limits
from equivtest.cases.case import defaults_of, fields_of, from_code, from_data, to_data
from equivtest.errors import Misuse
from equivtest.oracle import expect
from equivtest.property import Space
from equivtest.ranks.backend import Backend
from equivtest.ranks.pool import Pool
from equivtest.search.replay import read_replay, replay, write_replay
from equivtest.verdicts.judging import judge_replies, one_thread
from tests.drawing import PROPERTIES, SPACE, STRATEGIES, drawn, each, family_of, run_of, smallest
from tests.replies import StubPool, raised, right_replies
from tests.unsharded import errors_beside

REFUSED = [name for name, prop in PROPERTIES.items() if prop.refuses_only]
WITHIN = [name for name in PROPERTIES if name not in REFUSED]
IN_ALL_DTYPES = [name for name in WITHIN if not PROPERTIES[name].conclusive_dtypes]
PINNED_ON_FOUR = (
    "fsdp2_mlp", "zero3_mlp_all_gather", "zero3_mlp_all_reduce", "fsdp2_tp_mlp", "hsdp_mlp", "sequence_parallel_mlp",
    "sequence_parallel_mlp_trains",
)  # fmt: skip
DIVIDED_OTHERWISE = ("module", "operators", "operators.chains")
DIVIDED = [name for name in IN_ALL_DTYPES if PROPERTIES[name].shards and family_of(name) not in DIVIDED_OTHERWISE]
ON_ANY_MEMBERS = [
    name for name in WITHIN if family_of(name) not in ("training.two_axes", "training.deepspeed", "programs")
]
"""Cases of two axes, of DeepSpeed and of users' programs run on the whole world."""

COMPUTED = [name for name in WITHIN if family_of(name) not in ("dropout", "operators", "operators.chains")]
"""No two runs drop alike; what is right of an operator is torch's own unsharded run."""

LARGER: dict[str, dict[str, Any]] = {
    "dtensor_operators": {"operator": "abs", "requires_grad": (0,)},
    "reduction": {"operator": "sum", "requires_grad": (0,)},
    "dtensor_operator_chains": {"steps": (("neg", ("x0",), ()), ("neg", ("y0",), ())), "requires_grad": (0,)},
    "zero3_fetch_all_gather_refuses": {"parameters": ((1,), (1,)), "requires_grad": (True, True)},
    "deepspeed_mlp_stages_1_and_2": {"stage": 2},
}
"""Fields of simplest cases that are not the shortest ones drawn: parameters of two dtypes; what is drawn first."""

STORED_OTHERWISE = ("parallel_cross_entropy",)
"""Families for which torch's unsharded loss stores other 16-bit intermediates than the bounds assume."""

NUM_DRAWS = 60
"""Draws of each strategy that are compared with torch's unsharded run."""

# ------------------------------------------------------------------------------------------------
# Drawn cases


@each(STRATEGIES)
def test_each_dtype_has_at_least_15_percent_of_the_drawn_cases(name: str) -> None:
    counts = Counter(case.dtype for case in run_of(name))
    dtypes = PROPERTIES[name].conclusive_dtypes or limits.DTYPES

    assert min(counts[dtype] for dtype in dtypes) >= 0.15 * counts.total(), counts


@each(DIVIDED)
def test_three_in_five_of_the_drawn_cases_on_several_ranks_have_uneven_or_empty_shards(name: str) -> None:
    counts = Counter(case.shard_kind for case in run_of(name) if case.world_size > 1)

    assert counts["uneven"] + counts["empty"] > 0.6 * counts.total(), counts


@each(DIVIDED)
def test_cases_of_every_world_size_above_one_have_shards_of_every_kind(name: str) -> None:
    kinds = {(case.world_size, case.shard_kind) for case in run_of(name) if case.world_size > 1}

    assert kinds == {(w, kind) for w in (2, 3, 4) for kind in ("even", "uneven", "empty")}


@each(IN_ALL_DTYPES)
def test_at_most_five_percent_of_cases_are_drawn_twice(name: str) -> None:
    """Nor are neighbours copies of one another with one draw repeated, as Hypothesis likes to make them."""
    cases = run_of(name)
    neighbours = list(pairwise(cases))

    assert len(set(cases)) >= 0.95 * len(cases)
    assert sum(a.dtype == b.dtype for a, b in neighbours) < 0.4 * len(neighbours)


@each(ON_ANY_MEMBERS)
def test_about_one_drawn_case_in_six_uses_a_subset_of_the_processes(name: str) -> None:
    cases = run_of(name)
    within = [case for case in cases if case.members]

    assert len(cases) / 12 < len(within) < len(cases) / 4
    assert max(case.num_processes for case in cases) == 4
    assert any(list(case.members) != sorted(case.members) for case in within)
    assert any(len(case.groups) * case.world_size < case.num_processes for case in within)
    assert any(len(case.groups) > 1 for case in within)


@each(STRATEGIES)
def test_drawn_cases_have_the_world_sizes_and_dtypes_of_their_space(name: str) -> None:
    is_narrow = name in IN_ALL_DTYPES + REFUSED and PROPERTIES[name].resolve is None
    dtype = "bfloat16" if is_narrow else "float32"
    cases = drawn(STRATEGIES[name](Space((5, 16), (dtype,))), 15)

    assert {(case.world_size, case.dtype) for case in cases} == {(5, dtype), (16, dtype)}
    assert drawn(STRATEGIES[name](Space((limits.MAX_WORLD_SIZE,), (dtype,))), 3)


@each(STRATEGIES)
def test_strategy_shrinks_to_the_case_of_simplest_field_values(name: str) -> None:
    found = smallest(STRATEGIES[name](SPACE))
    wanted = {
        field: min(
            {fields_of(case)[field] for case in run_of(name)},
            key=lambda value: (value != default, len(repr(value)), repr(value)),
        )
        for field, default in defaults_of(type(found)).items()
    }

    assert found == type(found)(**wanted | LARGER.get(name, {}))


# ------------------------------------------------------------------------------------------------
# Cases


@each(STRATEGIES)
def test_drawn_cases_survive_a_round_trip_through_json_and_code(name: str) -> None:
    for case in run_of(name)[::4]:
        assert from_data(msgspec.json.decode(msgspec.json.encode(to_data(case)))) == case
        again = from_code(f"  {case!r}\n")
        assert again == case and type(again) is type(case)


@each(STRATEGIES)
def test_only_a_tensor_with_the_role_kept_is_passed_and_then_returned(name: str) -> None:
    for case in run_of(name)[::4]:
        given, answered = set(case.given_names()), set(case.answer_names())
        assert given and answered and given | answered == case.tensors.keys()
        assert given & answered == {name for name, tensor in case.tensors.items() if tensor.role == "kept"}


INVALID: dict[type, Any] = {str: "no such", int: -2, float: -1.0}
CODE = ("build", "parallelize", "optimizer", "step", "placed", "set_up", "tear_down")
ANYTHING = (*CODE, "ignore_index", "steps")  # the fields that depend on steps report errors of it
OF_AN_OPTIMIZER = ("lr", "momentum", "weight_decay")


@each(STRATEGIES)
def test_error_for_an_invalid_field_names_its_value_and_the_limit(name: str) -> None:
    """For text, integers and floats; the family's own tests cover requirements between fields."""
    case = next((case for case in run_of(name) if case.trains), run_of(name)[0])
    for field, valid in fields_of(case).items():
        invalid = INVALID.get(type(valid))
        if invalid is None or field in (ANYTHING if case.trains else ANYTHING + OF_AN_OPTIMIZER):
            continue
        with pytest.raises(Misuse) as told:
            dataclasses.replace(case, **{field: invalid})
        message = str(told.value)
        limit = f"{re.escape(str(valid))}|write 'replicate'|leave" if isinstance(valid, str) else r"\d|at least"
        assert str(invalid) in message or message.startswith(field), message
        assert re.search(limit, message.replace(str(invalid), "")), message


@each(STRATEGIES)
def test_only_refusal_properties_draw_cases_that_must_be_refused(name: str) -> None:
    assert {bool(case.refusal) for case in run_of(name)} == {name in REFUSED}


@pytest.mark.parametrize("name", PINNED_ON_FOUR)
def test_examples_shard_evenly_and_unevenly_on_four_ranks_in_float32_and_bfloat16(name: str) -> None:
    kinds = {(case.dtype, case.shard_kind) for case in PROPERTIES[name].examples if case.world_size == 4}

    assert {(dtype, kind) for dtype in ("float32", "bfloat16") for kind in ("even", "uneven")} <= kinds


@each(REFUSED)
def test_every_kind_of_invalid_input_is_drawn_and_has_no_expected_values(name: str) -> None:
    misfits = {case.misfit for case in run_of(name)}
    with pytest.raises(Misuse, match=r"misfit must be .*, got 'no such'") as told:
        dataclasses.replace(run_of(name)[0], misfit="no such")
    known = str(told.value).removeprefix("misfit must be ").removeprefix("one of ").partition(", got")[0]

    assert set(known.replace(" or ", ", ").split(", ")) == misfits
    assert all(case.refusal.endswith(case.misfit) and not expect(case, 0).tensors for case in run_of(name))


# ------------------------------------------------------------------------------------------------
# The oracle


@each(COMPUTED)
def test_unsharded_computation_by_torch_is_within_every_bound(name: str) -> None:
    """To the last bit if there are right bits; in 16 bits, where storage dominates, some error is near its bound."""
    worlds = (7, 8) if PROPERTIES[name].resolve else (7, 8, limits.MAX_WORLD_SIZE)
    cases = [*run_of(name), *drawn(STRATEGIES[name](Space(worlds, limits.DTYPES)), 20)]
    draws = [(case, index) for case in cases for index in range(len(case.values))]
    worst = dict.fromkeys(limits.DTYPES, 0.0)
    with one_thread():
        for case, index in draws[:: -(-len(draws) // NUM_DRAWS)]:
            if name not in STORED_OTHERWISE or case.dtype in ("float32", "float64"):
                errors = errors_beside(case, index)
                assert errors and max(errors.values()) <= 1, (case, index, errors)
                worst[case.dtype] = max(worst[case.dtype], *errors.values())
    near = max(worst["bfloat16"], worst["float16"])

    assert near == 0 or near > 0.3  # no error if none is allowed


# ------------------------------------------------------------------------------------------------
# Replay


@each(STRATEGIES)
def test_replay_file_of_a_failure_fails_again(name: str, tmp_path: Path) -> None:
    case, prop = run_of(name)[-1], PROPERTIES[name]
    replies = right_replies(case) if name in REFUSED else [raised(rank) for rank in range(case.num_processes)]
    verdict = judge_replies(prop.subject, case, replies, prop.claims)[0]
    data = read_replay(write_replay(verdict, Backend(), tmp_path))

    assert from_data(data["case"]) == case and (data["subject"], data["claim"]) == (prop.subject, verdict.claim)
    assert replay(data, cast(Pool, StubPool(lambda _: replies)))[0] and verdict.failed
