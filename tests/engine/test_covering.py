"""Covering arrays: every combination that some case can have, in few cases, the same everywhere, as all cases are."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import hypothesis
import pytest
from hypothesis import Phase

from equivtest.base import limits
from equivtest.cases.axes import Draw
from equivtest.cases.case import Case, require
from equivtest.families.embedding.case import EmbeddingCase
from equivtest.families.embedding.strategy import embedding_cases
from equivtest.property import Property, Space
from equivtest.pytest_plugin.suite import shipped
from equivtest.search.chunks import SETTINGS, Chunk, chunk_cases, covering_array_of, replay_of
from equivtest.search.covering import Array, covering_array
from equivtest.search.local_constants import no_local_constants
from tests.drawing import STRATEGIES, drawn

SPACE = Space((2,), ("float32", "float64"))
NAMES = ("a", "b", "c", "d")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Letters:
    """Stands for a case: four numbers, and a and b are never both 2."""

    a: int
    b: int
    c: int
    d: int

    def __post_init__(self) -> None:
        require((self.a, self.b) != (2, 2), "a and b are never both 2")


def letters(draw: Draw, space: Space) -> Case:
    """Draws each number from a table of three; d is 0 if c is."""
    numbers = {name: draw.pick(name, (0, 1, 2)) for name in NAMES}
    return cast("Case", Letters(**numbers | ({} if numbers["c"] else {"d": 0})))


def array_of_letters(strength: int, dangerous: tuple[str, ...] = ()) -> Array:
    return covering_array(letters, SPACE, strength, 1, dangerous)


def test_covering_array_has_every_pair_of_values_that_some_case_can_have() -> None:
    array = array_of_letters(2)
    pairs = {
        ((name, one), (other, two))
        for name, other in itertools.combinations(NAMES, 2)
        for one, two in itertools.product((0, 1, 2), repeat=2)
    }
    impossible = {(("a", 2), ("b", 2)), (("c", 0), ("d", 1)), (("c", 0), ("d", 2))}

    assert set(array.covered) == pairs - impossible
    assert set(array.infeasible) == impossible
    assert len(array.rows) < 14


def test_every_combination_that_an_array_counts_as_covered_is_in_one_of_its_rows() -> None:
    array = array_of_letters(2)
    cases = [row.case for row in array.rows]

    for combination in array.covered:
        assert any(all(getattr(case, name) == value for name, value in combination) for case in cases)


def test_covering_array_of_strength_1_has_every_value_in_few_rows() -> None:
    array = array_of_letters(1)

    assert len(array.covered) == 12 and len(array.rows) <= 4


def test_covering_array_has_every_possible_triple_of_values_of_dangerous_axes() -> None:
    array = array_of_letters(2, ("a", "b", "d"))
    triples = {tuple(getattr(row.case, name) for name in "abd") for row in array.rows}

    assert len(triples) == 27 - 3


def test_each_row_of_an_array_has_a_combination_that_no_other_row_has() -> None:
    array = covering_array_of(colwise(), GATE)
    assert array is not None
    covered = set(map(frozenset, array.covered))
    pairs = [covered.intersection(map(frozenset, itertools.combinations(row.values, 2))) for row in array.rows]
    counts = Counter(itertools.chain.from_iterable(pairs))

    assert set(counts) == covered
    assert all(any(counts[pair] == 1 for pair in of_row) for of_row in pairs)


def test_covering_array_has_fewer_rows_because_one_row_replaces_two() -> None:
    """Without that the array has 42 rows."""
    array = covering_array_of(colwise(), GATE)

    assert array is not None and len(array.rows) < 40


def test_first_rows_of_an_array_cover_most_pairs() -> None:
    array = covering_array(partial(embedding_cases.build, style="colwise"), Space((4,), limits.DTYPES), 2, 1)
    half = {pair for row in array.rows[: len(array.rows) // 2] for pair in itertools.combinations(row.values, 2)}

    assert sum(pair in half for pair in array.covered) > 2 * len(array.covered) / 3


PRINTED = """
import json, sys
sys.path.insert(0, {folder!r})
import full_of_constants
from tests.engine.test_covering import five_of_each, printed_array
print(json.dumps([printed_array(), five_of_each()]))
"""
GATE = Chunk(2, limits.DTYPES, 0, 3, strength=2)


def colwise() -> Property:
    return replace(shipped()["colwise_embedding"], examples=())


def printed_array() -> str:
    array = covering_array_of(colwise(), GATE)
    assert array is not None
    return f"{array.rows} {array.infeasible}"


def five_of_each() -> list[str]:
    """Five cases of each strategy."""
    with no_local_constants():
        space = Space((2,), ("float32", "bfloat16"))
        return [str(case) for strategy in STRATEGIES.values() for case in drawn(strategy(space), 5, number=11)]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """The array and the cases of a process with another hash seed and a module full of constants."""
    folder = tmp_path_factory.mktemp("constants")
    constants = [f"A{n} = {n}; B{n} = {10_007 * n}; S{n} = 'shard({n})'" for n in range(100)]
    (folder / "full_of_constants.py").write_text("\n".join(constants))
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PRINTED.format(folder=str(folder))]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    array, cases = json.loads(done.stdout)
    return array, cases


def test_every_process_makes_the_same_covering_array(elsewhere: tuple[str, list[str]]) -> None:
    assert elsewhere[0] == printed_array()


def test_drawn_cases_do_not_depend_on_other_imported_modules(elsewhere: tuple[str, list[str]]) -> None:
    """Hypothesis' own integers do, see test_chunks.py: they draw the constants of that module too."""
    here = five_of_each()

    assert elsewhere[1] == here and len(here) == 5 * len(STRATEGIES)


def test_chunks_of_all_world_sizes_take_rows_of_one_covering_array() -> None:
    array = covering_array_of(colwise(), GATE)
    assert array is not None
    chunks = [replace(GATE, world_size=world_size) for world_size in limits.WORLD_SIZES]

    cases = [case for chunk in chunks for case in chunk_cases(colwise(), chunk)]
    assert {row.case for row in array.rows} <= set(cases)


def test_conformance_run_covers_triples_of_values_of_dangerous_axes() -> None:
    array = covering_array_of(colwise(), replace(GATE, world_size=4, mixes_worlds=False))
    assert array is not None

    names = ("num_embeddings", "output_layout", "requires_grad")
    assert len({tuple(dict(row.values)[name] for name in names) for row in array.rows}) == 4 * 5 * 2


def test_run_on_one_world_size_has_every_pair_of_other_values() -> None:
    array, alone = (covering_array_of(colwise(), replace(GATE, world_sizes=sizes)) for sizes in ((1, 2, 3, 4), (2,)))
    assert array is not None and alone is not None

    assert all(any(set(pair) <= set(row.values) for row in alone.rows) for pair in alone.covered)
    assert {row.case.world_size for row in alone.rows} == {2}
    assert len(alone.rows) > len([row for row in array.rows if row.case.world_size == 2])


@pytest.mark.parametrize("place", [0, 6])
def test_shrinking_begins_with_the_failing_row_of_the_array(place: int) -> None:
    array = covering_array_of(colwise(), GATE)
    assert array is not None
    case = [row.case for row in array.rows if row.case.world_size == GATE.world_size][place]
    seen: list[Case] = []

    @hypothesis.settings(phases=[Phase.reuse], **SETTINGS | {"database": replay_of(colwise(), GATE, case)})
    @hypothesis.given(colwise().cases(GATE.space))
    def judge(case: Case) -> None:
        seen.append(case)

    judge()
    assert seen[0] == case


def test_hypothesis_gets_no_replay_of_a_case_outside_of_the_array() -> None:
    assert replay_of(colwise(), GATE, EmbeddingCase(world_size=2, style="colwise", leading=(99,))) is None
