"""Chunks: the same cases everywhere."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from equivtest.base import limits
from equivtest.base.profiles import PROFILES
from equivtest.cases.case import Case
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.families.zero3.fetch.strategy import fetch_cases
from equivtest.module import module_property
from equivtest.property import Property, Space
from equivtest.pytest_plugin.suite import properties_dir, shipped
from equivtest.report.handover import listed_of
from equivtest.report.tally import Tally
from equivtest.search import local_constants
from equivtest.search.chunks import Chunk, chunk_cases, draw_cases, seed_of
from equivtest.search.local_constants import no_local_constants
from equivtest.search.planned import has_case, profile_for
from equivtest.verdicts.claims import agrees_on_all_ranks, equals_unsharded
from studies.gate_draws import DRAW, LARGE, MADE_UP, lines_of_draws, lines_of_run, make_up_modules, mixed_suite

CHUNK = Chunk(2, limits.DTYPES, 0, 20)


def claimed(subject: str = "mine:fetch", **fields: Any) -> Property:
    """A property of fetches; no module may hold one, or pytest would run it."""
    made = Property(
        subject, "Fetched parameters are right.", "nowhere", fetch_cases, (equals_unsharded, agrees_on_all_ranks)
    )
    return replace(made, **fields)


def test_case_with_more_processes_than_devices_runs_on_the_whole_world() -> None:
    prop = shipped()["rowwise_linear"]
    chunk = Chunk(1, limits.DTYPES, 0, 20, world_sizes=(1, 2), strength=2)

    cases, on_devices = chunk_cases(prop, chunk), chunk_cases(prop, replace(chunk, is_limited=True))

    assert max(case.num_processes for case in cases) > 2
    assert max(case.num_processes for case in on_devices) == 2
    assert {replace(case, members=()) for case in on_devices} == {replace(case, members=()) for case in cases}


def test_cases_drawn_on_few_devices_have_no_more_processes() -> None:
    chunk = Chunk(1, ("float32",), 0, 20, world_sizes=(1,), is_limited=True)

    assert not any(case.num_processes > 1 for case in draw_cases(shipped()["rowwise_linear"], chunk, 200))


def test_run_on_few_devices_lacks_a_case_in_a_larger_world() -> None:
    case = FetchCase(world_size=1, members=(1,))

    assert has_case((1,), ("float32",), case, is_limited=False)
    assert not has_case((1,), ("float32",), case, is_limited=True)
    assert has_case((1, 2), ("float32",), case, is_limited=True)


MINE = """
import zlib
from hypothesis import strategies as st
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.property import Property
from equivtest.verdicts.claims import equals_unsharded


def cases(space):
    drawn = st.tuples(st.integers(), st.floats(), st.text(), st.binary())
    return st.builds(
        FetchCase,
        world_size=st.sampled_from(space.world_sizes),
        dtype=st.sampled_from(space.dtypes),
        parameters=st.tuples(st.tuples(st.integers(1, 999))),
        values=drawn.map(lambda values: (("dense", zlib.crc32(repr(values).encode())),)),
    )


mine = Property("mine:fetch", "It is.", "here", cases, (equals_unsharded,), weight=10)
"""
"""A user's property, whose strategy draws integers, floats, strings and bytes."""


SCALE = "test_scale.py"
"""The file of one shipped property, whose cases come from tables and take little time to draw and to run."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Modules full of constants, and in the folder 'own' a user's property beside shipped ones."""
    folder = tmp_path_factory.mktemp("folder")
    make_up_modules(folder)
    (folder / "own").mkdir()
    (folder / "own" / "test_mine.py").write_text(MINE)
    shutil.copy(properties_dir() / SCALE, folder / "own")
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[str]:
    """The draws of this process, which imports no module full of constants."""
    options = {"files": "test_*.py", "folder": str(folder / "own"), "subjects": [], "imports": []}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.setattr(sys, "argv", ["", json.dumps(options)])
        for path in (folder / "own").glob("*.py"):
            patch.setitem(sys.modules, path.stem, None)  # so that the module goes again
        exec(DRAW, {})
    return sorted(set(printed.getvalue().splitlines()))


def import_made_up(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Imports modules full of constants, for as long as the test takes."""
    monkeypatch.syspath_prepend(folder)
    for name in make_up_modules(folder):
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.import_module(name)


def test_property_draws_equal_cases_whatever_modules_are_imported(folder: Path, alone: list[str]) -> None:
    among_others = lines_of_draws(folder, folder=str(folder / "own"), imports=list(MADE_UP), hash_seed=7)

    assert {json.loads(line)[0] for line in alone} == {"mine:fetch", "scale"}
    assert len(alone) > 100 and alone == among_others


def test_hypothesis_tests_of_the_user_still_draw_constants_from_imported_modules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def cases(space: Space) -> SearchStrategy[Case]:
        return integers.map(lambda number: FetchCase(world_size=2, values=(("dense", number),)))

    integers = st.integers(0, 2**60)
    import_made_up(monkeypatch, tmp_path)
    ours = {
        seed for case in chunk_cases(claimed(cases=cases), replace(CHUNK, num_cases=1000)) for _, seed in case.values
    }

    theirs = set()

    @hypothesis.seed(0)
    @hypothesis.settings(max_examples=1000, database=None)
    @hypothesis.given(integers)
    def test_of_the_user(number: int) -> None:
        theirs.add(number)

    test_of_the_user()
    assert not ours & set(LARGE) and theirs & set(LARGE)


def test_loaded_hypothesis_profile_changes_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    before = chunk_cases(claimed(), CHUNK)
    chosen = hypothesis.settings.get_current_profile_name()
    monkeypatch.setitem(importlib.import_module(local_constants.HOME).AVAILABLE_PROVIDERS, "another", "nobody.Has")
    hypothesis.settings.register_profile("another", backend="another", derandomize=True, max_examples=1)
    hypothesis.settings.load_profile("another")
    try:
        assert chunk_cases(claimed(), CHUNK) == before
    finally:
        hypothesis.settings.load_profile(chosen)


def test_warning_appears_if_hypothesis_lacks_the_function_that_collects_constants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The installed one does not; a release that draws no constants causes no warning."""
    home = importlib.import_module(local_constants.HOME)
    monkeypatch.delattr(home, local_constants.FINDER)
    with pytest.warns(UserWarning, match="may depend on what else is imported"), no_local_constants():
        pass

    monkeypatch.setattr(hypothesis, "__version_info__", (6, 131, 0))
    with no_local_constants():
        assert not hasattr(home, local_constants.FINDER)


@pytest.mark.ranks
def test_run_under_xdist_judges_the_cases_that_one_process_draws(folder: Path, alone: list[str]) -> None:
    judged = lines_of_run(folder, 1, mixed_suite(folder, SCALE), "--known-failures=none")

    assert len(judged) > 20
    assert judged == [line for line in alone if json.loads(line)[0] == "scale"]


@pytest.mark.parametrize(
    ("prop", "chunk"),
    [
        (claimed(), replace(CHUNK, index=1)),
        (claimed(), replace(CHUNK, world_size=3)),
        (claimed(), replace(CHUNK, seed="another")),
        (claimed("mine:other"), CHUNK),
        (claimed(claims=(equals_unsharded,)), CHUNK),
    ],
    ids=["chunk", "world size", "seed", "subject", "claims"],
)
def test_different_chunks_draw_different_cases(prop: Property, chunk: Chunk) -> None:
    here, there = ({fetch.parameters for fetch in fetches(*of)} for of in ((claimed(), CHUNK), (prop, chunk)))

    assert seed_of(prop, chunk) != seed_of(claimed(), CHUNK)
    assert len(here & there) < len(here) / 2


def fetches(prop: Property, chunk: Chunk) -> list[FetchCase]:
    return [case for case in chunk_cases(prop, chunk) if isinstance(case, FetchCase)]


def test_drawing_a_chunk_again_gives_equal_cases() -> None:
    cases = chunk_cases(claimed(), replace(CHUNK, dtypes=("float64",)))

    assert cases == chunk_cases(claimed(), replace(CHUNK, dtypes=("float64",)))
    assert {(case.world_size, case.dtype) for case in cases} == {(2, "float64")}
    assert len(cases) == len(set(cases)) > 10


def test_examples_come_first_in_chunk_0() -> None:
    wanted = FetchCase(world_size=2, parameters=((77,),))
    others = (FetchCase(world_size=3, parameters=((77,),)), replace(wanted, dtype="float16"))
    prop = claimed(examples=(others[0], wanted, others[1]))
    chunk = replace(CHUNK, dtypes=("float32", "float64"))

    assert chunk_cases(prop, chunk)[0] == wanted
    assert not set(others) & set(chunk_cases(prop, chunk))
    assert wanted not in chunk_cases(prop, replace(chunk, index=1))


def test_cases_meant_to_fill_cells_run_only_if_the_run_requires_cells() -> None:
    prop = claimed(for_cells=(FetchCase(world_size=2, parameters=((77,),)),))

    assert not set(prop.for_cells) & set(chunk_cases(prop, CHUNK))
    assert chunk_cases(prop, replace(CHUNK, per_cell=1))[0] == prop.for_cells[0]


def test_conformance_run_has_the_gates_cases_of_an_incomplete_property_unless_an_option_names_it() -> None:
    prop, wanted = claimed(incomplete="some fail"), PROFILES["conformance"]

    assert profile_for(prop, wanted) is PROFILES["gate"]
    assert profile_for(prop, wanted, [("mine:fetch", "mine:fetch")]) is wanted
    assert profile_for(claimed(), wanted) is wanted and profile_for(prop, PROFILES["soak"]) is PROFILES["soak"]


@pytest.mark.parametrize("incomplete", ["", "some fail"])
def test_only_a_complete_property_requires_conclusions_in_its_cells(incomplete: str) -> None:
    listed = listed_of(claimed(incomplete=incomplete), path="", name="mine", planned=("w2-0",), has_audit=False)

    assert bool(Tally(listed).required_cells(["float32"])) == (not incomplete)


def aspects_of(prop: Property, chunk: Chunk) -> set[str]:
    return {aspect for case in chunk_cases(prop, chunk) for aspect in case.aspects}


def test_first_chunk_has_even_and_uneven_shards_when_one_case_is_drawn() -> None:
    one = replace(CHUNK, num_cases=1)

    assert aspects_of(claimed(), one) == {"even", "uneven"} and len(chunk_cases(claimed(), one)) == 2
    assert len(chunk_cases(claimed(), replace(one, index=1))) == 1
    assert len(chunk_cases(claimed(), replace(one, world_size=1))) == 1


def test_first_chunk_adds_no_case_if_examples_have_even_and_uneven_shards() -> None:
    examples = (FetchCase(world_size=2, parameters=((4,),)), FetchCase(world_size=2, parameters=((5,),)))

    assert len(chunk_cases(claimed(examples=examples), replace(CHUNK, num_cases=1))) == 3


def test_first_chunk_adds_no_case_for_a_property_without_uneven_shards() -> None:
    one = FetchCase(world_size=2, parameters=((4,),))

    assert chunk_cases(claimed(cases=lambda space: st.just(one)), replace(CHUNK, num_cases=1)) == [one]


@pytest.mark.parametrize(("batch", "even"), [("whole", (4, 2)), ("mean of parts", (8, 2))])
def test_first_chunk_of_a_module_has_every_mesh_shape_and_uneven_rows(batch: str, even: tuple[int, int]) -> None:
    prop = module_property("torch.nn:Identity", "mine:same", (even, (5, 2)), batch=batch, axes=("dp", "tp"))
    cases = chunk_cases(prop, Chunk(4, ("float32",), 0, 1))

    assert {case.mesh_shape for case in cases} == {(4, 1), (2, 2), (1, 4)}
    assert {case.shapes()["x"] for case in cases} == {even, (5, 2)} and len(cases) <= 4
