"""A backend that rounds to fewer bits is judged by what it declares, and by no more."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from equivtest.check import judge, judge_replies
from equivtest.errors import Misuse
from equivtest.oracle.declared import arithmetic_of, declared, load_arithmetics
from equivtest.oracle.rounding import TORCH_CPU, Arithmetic
from equivtest.ranks.backend import Backend
from equivtest.ranks.pool import Pool
from equivtest.settings import check, parse
from tests.replies import LINEAR, StubPool, on_all_ranks

CASE = replace(LINEAR, values=(("real", 0),))
NARROW = {**TORCH_CPU, "float32": Arithmetic("float32", accumulate="float16", reduce="float16")}
THROUGH_FLOAT16 = on_all_ranks(CASE, "output", lambda output: output.half().float())
THROUGH_BFLOAT16 = on_all_ranks(CASE, "output", lambda output: output.bfloat16().float())

MODULE = """
from equivtest.oracle.rounding import TORCH_CPU, Arithmetic
MINE = TORCH_CPU | {"float32": Arithmetic("float32", accumulate="float16", reduce="float16")}
PART = {"float32": MINE["float32"]}
WRONG = TORCH_CPU | {"float32": MINE["bfloat16"]}
NUMBER = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module with records, good and bad."""
    (tmp_path / "arithmetic_of_a_vendor.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "arithmetic_of_a_vendor", raising=False)
    load_arithmetics.cache_clear()
    return "arithmetic_of_a_vendor"


def test_what_a_backend_rounds_as_declared_holds_and_fails_by_torchs_arithmetic() -> None:
    kinds = [
        {verdict.kind for verdict in judge_replies("mine", CASE, THROUGH_FLOAT16, None, arithmetics)}
        for arithmetics in (TORCH_CPU, NARROW)
    ]

    assert kinds == [{"value", "holds"}, {"holds"}]


def test_what_it_rounds_beyond_its_declaration_fails() -> None:
    assert "value" in {verdict.kind for verdict in judge_replies("mine", CASE, THROUGH_BFLOAT16, None, NARROW)}


def test_a_declaration_lasts_as_long_as_its_block() -> None:
    with declared(NARROW):
        assert arithmetic_of("float32") is NARROW["float32"]
    assert arithmetic_of("float32") is TORCH_CPU["float32"]


def test_a_pool_is_judged_by_what_its_backend_declares(mine: str) -> None:
    pool = StubPool(lambda case: THROUGH_FLOAT16)
    pool.backend = Backend(arithmetic=f"{mine}:MINE")

    assert {verdict.kind for verdict in judge("mine", CASE, cast(Pool, pool))} == {"holds"}


def test_the_option_reaches_the_backend(mine: str) -> None:
    settings = parse({"arithmetic": f"{mine}:MINE"})
    check(settings)

    assert settings.make_backend().arithmetic == f"{mine}:MINE"


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("NOTHING", "cannot be imported: .* write package.module:NAME"),
        ("PART", "holds no Arithmetic of float64, got None"),
        ("WRONG", "holds no Arithmetic of float32, got Arithmetic.dtype='bfloat16'"),
        ("NUMBER", "holds no Arithmetic of float32, got None: give a mapping"),
    ],
)
def test_what_is_no_declaration_is_refused_before_anything_runs(mine: str, attribute: str, message: str) -> None:
    with pytest.raises(Misuse, match=message):
        check(parse({"arithmetic": f"{mine}:{attribute}"}))
