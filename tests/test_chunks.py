"""Chunks: the same cases everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from equivtest import limits
from equivtest.cases.fetch import FetchCase
from equivtest.cases.strategies import fetch_cases
from equivtest.chunks import Chunk, chunk_cases, seed_of
from equivtest.property import Property
from equivtest.suite import properties_dir
from equivtest.verdicts.claims import agrees_on_all_ranks, equals_unsharded

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
