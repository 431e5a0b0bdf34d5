"""Chunks: the same cases everywhere, and enough of them in every cell."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis.strategies import SearchStrategy

from equivtest import limits
from equivtest.cases.base import Case
from equivtest.cases.fetch import FetchCase
from equivtest.cases.strategies import data_parallel_cases, fetch_cases, redistribute_cases, refused_fetch_cases
from equivtest.chunks import BATCH, PATIENCE, Cell, Chunk, cells_of, chunk_cases, draws_by_cell, seed_of
from equivtest.property import Property, Space
from equivtest.suite import properties_dir
from equivtest.verdicts.claims import (
    agrees_on_all_ranks,
    equals_unsharded,
    is_the_identity_for_one_rank,
    refuses,
    repeats_itself,
    uses_only_collectives,
)

CHUNK = Chunk(2, limits.DTYPES, 0, 20)


def claimed(subject: str = "mine:fetch", **fields: Any) -> Property:
    """A property of fetches; no module may hold one, or pytest would run it."""
    made = Property(
        subject, "Fetched parameters are right.", "nowhere", fetch_cases, (equals_unsharded, agrees_on_all_ranks)
    )
    return replace(made, **fields)


SCRIPT = """
import importlib.util, json, sys
from pathlib import Path
from equivtest import limits
from equivtest.chunks import Chunk, chunk_cases
others, folder = sys.argv[1:3]
if others:
    import decimal, fractions, numpy, sqlite3, torch.distributed.tensor, tests.drawing, tests.fake_suite, made_up
    from equivtest import cli, plugin
for path in sorted(Path(folder).glob("test_*.py" if others else "test_zero3_fetch.py")):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    if path.stem == "test_zero3_fetch":
        found = vars(module)
names = ("zero3_fetch_all_reduce", "zero3_fetch_all_gather_refuses")
chunks = [Chunk(world_size, limits.DTYPES, 1, 20) for world_size in (2, 3)]
print(json.dumps([repr(case) for name in names for chunk in chunks for case in chunk_cases(found[name], chunk)]))
"""


def test_a_chunk_draws_the_same_cases_whatever_else_is_imported(tmp_path: Path) -> None:
    """One property file alone, and all of them among other local modules full of constants."""
    (tmp_path / "made_up.py").write_text(
        "SIZES = [5, 77, 1001]\nNAMES = ('shard(7)', 'float8')\nSEEDS = (12345, 2.5)\n"
    )
    root = str(Path(__file__).parent.parent)
    drawn = []
    for others, seed in (("", "0"), ("yes", "7")):
        environment = {"PYTHONPATH": f"{root}:{tmp_path}", "PYTHONHASHSEED": seed, "PATH": ""}
        command = [sys.executable, "-c", SCRIPT, others, str(properties_dir())]
        drawn.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True))
    alone, among_others = (json.loads(process.communicate(timeout=120)[0]) for process in drawn)

    assert len(alone) > 60 and alone == among_others


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
def test_what_differs_draws_other_cases(prop: Property, chunk: Chunk) -> None:
    """By another seed: their parameters differ too, not only what the chunk fixes."""
    here, there = ({fetch.parameters for fetch in fetches(*of)} for of in ((claimed(), CHUNK), (prop, chunk)))

    assert seed_of(prop, chunk) != seed_of(claimed(), CHUNK)
    assert len(here & there) < len(here) / 2


def fetches(prop: Property, chunk: Chunk) -> list[FetchCase]:
    return [case for case in chunk_cases(prop, chunk) if isinstance(case, FetchCase)]


def test_a_chunk_draws_the_same_cases_twice() -> None:
    """In its own world size and dtypes, and each once."""
    cases = chunk_cases(claimed(), replace(CHUNK, dtypes=("float64",)))

    assert cases == chunk_cases(claimed(), replace(CHUNK, dtypes=("float64",)))
    assert {(case.world_size, case.dtype) for case in cases} == {(2, "float64")}
    assert len(cases) == len(set(cases)) > 10


def test_the_examples_come_first_in_chunk_0() -> None:
    """Those of its world size and dtypes."""
    wanted = FetchCase(world_size=2, parameters=((77,),))
    others = (FetchCase(world_size=3, parameters=((77,),)), replace(wanted, dtype="float16"))
    prop = claimed(examples=(others[0], wanted, others[1]))
    chunk = replace(CHUNK, dtypes=("float32", "float64"))

    assert chunk_cases(prop, chunk)[0] == wanted
    assert not set(others) & set(chunk_cases(prop, chunk))
    assert wanted not in chunk_cases(prop, replace(chunk, index=1))


# Cells.


def filled(prop: Property, per_cell: int = 9, **fields: Any) -> Counter[Cell]:
    """Draws by cell of a chunk of one case, and of those that fill its cells."""
    found = Counter[Cell]()
    for case in chunk_cases(prop, replace(CHUNK, num_cases=1, per_cell=per_cell, **fields)):
        found += draws_by_cell(prop, case)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "prop",
    [
        claimed(claims=(equals_unsharded, repeats_itself)),
        claimed(cases=refused_fetch_cases, claims=(refuses,)),
        claimed(cases=lambda space: data_parallel_cases(space, style="ddp"), claims=(equals_unsharded,), shards=False),
        claimed(conclusive_dtypes=("float64",), claims=(equals_unsharded,)),
    ],
    ids=["fetches", "refusals", "without shards", "one dtype"],
)
def test_every_cell_gets_its_draws(prop: Property, world_size: int) -> None:
    """A claim that is judged on some visits only gets them over all dtypes together."""
    found = filled(prop, world_size=world_size)

    assert min(found[cell] for cell in cells_of(prop, replace(CHUNK, world_size=world_size))) >= 9


def test_cells_without_cases_end_the_filling() -> None:
    """On two ranks nothing is judged of one rank."""
    found = filled(claimed(claims=(equals_unsharded, is_the_identity_for_one_rank)))

    assert {claim for _, _, claim in found} == {"equals_unsharded"}


def test_only_cases_that_help_a_cell_are_kept() -> None:
    """About as many as there are cells to fill, of several draws each."""
    cases = chunk_cases(claimed(), replace(CHUNK, num_cases=1, per_cell=9))

    assert 3 * 4 < len(cases) < 9 * 3 * 4 and len(cases) == len(set(cases))


def is_small(case: Case, claim: str) -> bool:
    """All claims on fetches of few parameters, and all but one on any."""
    assert isinstance(case, FetchCase)
    return len(case.parameters) < 3 or claim != "equals_unsharded"


def test_a_claim_that_is_known_to_fail_fills_its_cells_with_other_cases() -> None:
    """What the same cases say of another claim counts: those that help no cell are not added."""
    prop, chunk = claimed(), replace(CHUNK, num_cases=1, per_cell=9)
    found, of_all = Counter[Cell](), Counter[Cell]()
    for case in chunk_cases(prop, chunk, is_small):
        found += draws_by_cell(prop, case, is_small)
        of_all += draws_by_cell(prop, case)

    assert min(found[cell] for cell in cells_of(prop, chunk)) >= 9
    assert found != of_all
    assert {cell[2] for cell in of_all if of_all[cell] > found[cell]} == {"equals_unsharded"}


def test_a_cell_that_one_case_in_a_hundred_helps_is_filled() -> None:
    """Though batches of cases help none; drawn in the dtypes alone that are short of draws."""
    prop, chunk = claimed(claims=(equals_unsharded,)), replace(CHUNK, num_cases=1, per_cell=1)
    found = Counter[Cell]()

    def is_rare(case: Case, claim: str) -> bool:
        assert isinstance(case, FetchCase)
        return case.dtype != "float16" or case.values[0][1] < 2

    for case in chunk_cases(prop, chunk, is_rare):
        found += draws_by_cell(prop, case, is_rare)

    assert min(found[cell] for cell in cells_of(prop, chunk)) >= 1


def test_a_claim_that_is_judged_on_marked_cases_marks_those_that_it_lacks() -> None:
    """As few as it needs; none is drawn marked, and those of which no collectives are documented stay as they are."""
    prop = claimed(cases=unmarked, claims=(equals_unsharded, uses_only_collectives))
    cases = chunk_cases(prop, replace(CHUNK, world_size=4, num_cases=20, per_cell=9))
    recorded = [case for case in cases if case.records]
    draws = Counter(case.shard_kind for case in recorded for _ in case.values)
    most = max(len(case.values) for case in cases)

    assert all(9 <= draws[kind] < 9 + most for kind in ("even", "uneven", "empty"))
    assert not any(len(case.mesh_shape) > 1 for case in recorded)
    assert any(len(case.mesh_shape) > 1 for case in cases)


def unmarked(space: Space) -> SearchStrategy[Case]:
    """Redistributions, on one axis and two, none of them recorded."""
    return redistribute_cases(space).map(lambda case: replace(case, records=False))


def test_a_mark_with_which_a_claim_is_known_to_fail_is_not_made() -> None:
    """The case then says what it can say without."""

    def is_judged(case: Case, claim: str) -> bool:
        return not case.records

    prop = claimed(cases=unmarked, claims=(equals_unsharded, uses_only_collectives))
    cases = chunk_cases(prop, replace(CHUNK, num_cases=1, per_cell=9), is_judged)

    assert len(cases) > 12 and not any(case.records for case in cases)


def test_cells_that_cannot_be_had_end_the_filling_within_the_budget() -> None:
    asked: list[Case] = []

    def is_never(case: Case, claim: str) -> bool:
        asked.append(case)
        return False

    cases = chunk_cases(claimed(claims=(equals_unsharded,)), replace(CHUNK, per_cell=9), is_never)

    assert len(cases) <= CHUNK.num_cases
    assert PATIENCE * BATCH / 2 < len(asked) - len(cases) <= PATIENCE * BATCH


def test_shards_of_which_no_conclusion_is_wanted_have_no_cell() -> None:
    prop = claimed(conclusive_shards=("even", "uneven"))

    assert {kind for _, kind, _ in cells_of(prop, CHUNK)} == {"even", "uneven"}
    assert {kind for _, kind, _ in cells_of(claimed(), CHUNK)} == {"even", "uneven", "empty"}
