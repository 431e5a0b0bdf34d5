"""Checkpoints: what the case refuses, and how the state is saved."""

from __future__ import annotations

import functools

import pytest
import torch

from equivtest.cases.values import draw
from equivtest.families.checkpoint.case import LOADS, SAVES, STATES, WRITERS, CheckpointCase, loads_of, saves_of
from equivtest.families.checkpoint.subject_moves import STEP, Application, state_of
from tests.families.refusing import refuses

case_of = functools.partial(CheckpointCase, world_size=2, shape=(3, 2))

test_error_for_an_invalid_checkpoint_names_the_invalid_field = refuses(
    case_of,
    ({"saved": "shard(2)"}, r"saved must be one of shard\(0\), shard\(1\), replicate, plain, got shard\(2\)"),
    ({"loaded": "partial(sum)"}, r"loaded must be one of shard\(0\), .*, got partial\(sum\)"),
    ({"writer": "tar"}, "writer must be one of one file, file per tensor, .*, got 'tar'"),
    ({"state": "y"}, "state must be one of x, pair, .*, got 'y'"),
    ({"saves": "twice"}, "saves must be one of save, lowest rank, .*, got 'twice'"),
    ({"loads": "async"}, "loads must be one of load, partial, converted, alone, got 'async'"),
    ({"writer": "safetensors", "state": "nested"}, "a file of safetensors has tensors only, got state='nested'"),
    ({"writer": "consolidated", "saves": "alone"}, "must load what they saved, and not as safetensors, got"),
    ({"saves": "alone", "loaded": "replicate"}, r"must load what they saved, .*, got 'shard\(0\)', 'replicate'"),
    ({"saves": "alone", "loads": "alone"}, "ranks that saved alone must load together, .* got 'alone'"),
)


@pytest.mark.parametrize("saved", ["replicate", "plain"])
def test_rank_that_saves_the_whole_tensor_alone_may_load_any_shard(saved: str) -> None:
    assert case_of(saved=saved, loaded="shard(1)", saves="alone").saves == "alone"


def test_ways_to_load_depend_on_the_way_to_save() -> None:
    assert [loads_of("one file", saves) for saves in SAVES] == [LOADS] * 4 + [("load", "partial")]


def test_files_of_safetensors_are_not_converted() -> None:
    assert loads_of("safetensors", "save") == ("load", "partial", "alone")


@pytest.mark.parametrize("writer", WRITERS)
def test_only_writers_with_a_list_of_tensors_save_alone(writer: str) -> None:
    assert ("alone" in saves_of(writer, "shard(0)", "shard(0)")) == (writer not in ("safetensors", "consolidated"))


def test_second_tensor_has_the_reversed_shape_and_counts_on() -> None:
    tensors = draw(case_of(state="pair", values=(("index", 0),)), 0)
    assert tensors["x"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert tensors["y"].tolist() == [[7, 8, 9], [10, 11, 12]]


@pytest.mark.parametrize("kind", STATES[2:])
def test_state_of_another_step_differs(kind: str) -> None:
    tensors = {"x": torch.ones(2), "y": torch.ones(2)}
    assert state_of(kind, tensors, STEP) == state_of(kind, tensors, STEP)
    assert state_of(kind, tensors, STEP) != state_of(kind, tensors, 0)


def test_application_loads_the_number_of_its_step() -> None:
    application = Application({"x": torch.ones(2)}, 0)
    application.load_state_dict({**application.state_dict(), "step": STEP})
    assert application.step == STEP
