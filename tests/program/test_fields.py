"""A module's case is made of parts, and written flat."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import pytest

from equivtest.cases.case import fields_of, from_code, from_data, to_data
from equivtest.errors import Misuse
from equivtest.programs.case import ModuleCase
from equivtest.programs.fields import Judge, Training, World
from equivtest.search.known import Condition

STEPS = "tests.programs.steps:"
CASE = ModuleCase(
    world_size=2, build=f"{STEPS}squares", parallelize="tests.programs.module:whole", x_shape=(2, 3),
    optimizer=f"{STEPS}sgd", steps=2, values=(("real", 0),), zero_or_none=("x",),
)  # fmt: skip


def test_each_field_of_a_case_belongs_to_one_group() -> None:
    assert CASE.training == Training(optimizer=f"{STEPS}sgd", steps=2)
    assert CASE.judge == Judge(zero_or_none=("x",))
    assert CASE.arguments.x_shape == (2, 3) and CASE.world == World()


def test_written_case_lists_the_fields_of_all_groups() -> None:
    written = to_data(CASE)["fields"]

    assert written.keys() == fields_of(CASE).keys()
    assert written["optimizer"] == f"{STEPS}sgd" and "training" not in written
    assert f"optimizer='{STEPS}sgd', steps=2" in repr(CASE) and "Training" not in repr(CASE)
    assert from_data(msgspec.json.decode(msgspec.json.encode(to_data(CASE)))) == from_code(repr(CASE)) == CASE


@pytest.mark.parametrize("changes", [{"steps": 3}, {"x_shape": (3, 3), "zero_or_none": ()}])
def test_field_of_a_group_can_be_replaced_by_its_name_alone(changes: dict[str, Any]) -> None:
    changed = CASE.but(**changes)

    assert changed == dataclasses.replace(CASE, **changes) != CASE
    assert fields_of(changed) == fields_of(CASE) | changes


def test_condition_of_a_known_failure_can_name_a_group_field() -> None:
    assert Condition("steps", "==", 2).holds(CASE)
    assert not Condition("optimizer", "==", "").holds(CASE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"x_shape": (0, 3)}, r"x_shape must be at least 1, got \(0, 3\)"),
        ({"state": "none"}, "state must be one of '', 'own rows', 'whole batch', got 'none'"),
        ({"axes": ("dp",)}, r"mesh must say how many ranks lie along each of axes \('dp',\), got \(\)"),
    ],
)
def test_error_for_an_invalid_field_of_a_group_names_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Misuse, match=message):
        CASE.but(**changes)


def test_unknown_field_raises_type_error() -> None:
    with pytest.raises(TypeError, match="ModuleCase has no field colour"):
        CASE.but(colour="red")
    with pytest.raises(TypeError, match="ModuleCase needs world_size"):
        ModuleCase(build="", parallelize="")


def test_written_field_of_a_wrong_type_is_refused() -> None:
    data = to_data(CASE)

    with pytest.raises(Misuse, match=r"not a valid ModuleCase: .*steps"):
        from_data({**data, "fields": {**data["fields"], "steps": "2"}})
    with pytest.raises(Misuse, match=r"ModuleCase has the fields axes, .*'training'"):
        from_data({**data, "fields": {**data["fields"], "training": {}}})


def test_infinite_norm_survives_json_and_code() -> None:
    case = CASE.but(max_norm=0.5, norm_type=math.inf)

    assert from_data(msgspec.json.decode(msgspec.json.encode(to_data(case)))) == from_code(repr(case)) == case
