"""A backend that rounds to fewer bits is judged by what it declares, and by no more."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from equivtest import cli
from equivtest.cases.case import Case
from equivtest.errors import Misuse
from equivtest.families.training.mixed.case import MixedCase
from equivtest.oracle.declared import arithmetic_of, declared, load_arithmetics
from equivtest.oracle.operands import bound_reduction
from equivtest.oracle.rounding import TORCH_CPU, Arithmetic
from equivtest.pytest_plugin.settings import check, parse
from equivtest.ranks.backend import Backend
from equivtest.ranks.pool import Pool
from equivtest.search.chunks import Chunk, chunk_cases
from equivtest.search.filling import fill, short_of_draws
from equivtest.verdicts.judging import judge, judge_replies
from properties import test_data_parallel
from tests.replies import LINEAR, StubPool, on_all_ranks, right_replies

CASE = replace(LINEAR, values=(("real", 0),))
NARROW = {**TORCH_CPU, "float32": Arithmetic("float32", accumulate="float16", reduce="float16")}
THROUGH_FLOAT16 = on_all_ranks(CASE, "output", lambda output: output.half().float())
THROUGH_BFLOAT16 = on_all_ranks(CASE, "output", lambda output: output.bfloat16().float())

MODULE = """
from equivtest.oracle.rounding import TORCH_CPU, Arithmetic
MINE = TORCH_CPU | {"float32": Arithmetic("float32", accumulate="float16", reduce="float16")}
PART = {"float32": MINE["float32"], "bfloat16": MINE["bfloat16"]}
WRONG = TORCH_CPU | {"float32": MINE["bfloat16"]}
UNKNOWN = {"float8": MINE["bfloat16"]}
NOTHING = {}
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


def test_coarse_rounding_passes_only_if_the_backend_declares_it() -> None:
    kinds = [
        {verdict.kind for verdict in judge_replies("mine", CASE, THROUGH_FLOAT16, None, arithmetics)}
        for arithmetics in (TORCH_CPU, NARROW)
    ]

    assert kinds == [{"value", "holds"}, {"holds"}]


def test_claim_fails_for_a_rounding_coarser_than_declared() -> None:
    assert "value" in {verdict.kind for verdict in judge_replies("mine", CASE, THROUGH_BFLOAT16, None, NARROW)}


def test_declared_arithmetic_applies_only_within_the_with_block() -> None:
    with declared(NARROW):
        assert arithmetic_of("float32") is NARROW["float32"]
    assert arithmetic_of("float32") is TORCH_CPU["float32"]


def test_replies_of_a_pool_are_judged_by_the_declared_arithmetic_of_its_backend(mine: str) -> None:
    pool = StubPool(lambda case: THROUGH_FLOAT16)
    pool.backend = Backend(arithmetic=f"{mine}:MINE")

    assert {verdict.kind for verdict in judge("mine", CASE, cast(Pool, pool))} == {"holds"}


def test_arithmetic_option_sets_the_declared_arithmetic_of_the_backend(mine: str) -> None:
    settings = parse({"arithmetic": f"{mine}:MINE"})
    check(settings)

    assert settings.make_backend().arithmetic == f"{mine}:MINE"
    assert settings.declared["float32"]["reduce"] == "float16" and len(settings.declared) == 4


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("ABSENT", "cannot be imported: .* write package.module:NAME"),
        ("PART", "it declares float32, bfloat16, but not float64, float16: .* with --dtypes float32,bfloat16"),
        ("WRONG", "has no Arithmetic of float32, got Arithmetic.dtype='bfloat16'"),
        ("UNKNOWN", "has no Arithmetic of float8, got .*: give one for each dtype that the backend has, of float32"),
        ("NOTHING", "is no mapping of dtypes to their Arithmetic, got {}"),
        ("NUMBER", "is no mapping of dtypes to their Arithmetic, got 3"),
    ],
)
def test_invalid_declared_arithmetic_is_refused_before_anything_runs(mine: str, attribute: str, message: str) -> None:
    with pytest.raises(Misuse, match=message):
        check(parse({"arithmetic": f"{mine}:{attribute}"}))


def test_backend_may_declare_only_the_dtypes_that_it_has(mine: str) -> None:
    check(parse({"arithmetic": f"{mine}:PART", "dtypes": "bfloat16,float32"}))

    pool = StubPool(lambda case: THROUGH_FLOAT16)
    pool.backend = Backend(arithmetic=f"{mine}:PART")
    assert {verdict.kind for verdict in judge("mine", CASE, cast(Pool, pool))} == {"holds"}


def test_judging_a_dtype_that_the_backend_does_not_declare_raises_misuse(mine: str) -> None:
    case = replace(CASE, dtype="float64")
    with pytest.raises(Misuse, match="it declares float32, bfloat16, but not float64: add a record for each, or leave"):
        judge_replies("mine", case, right_replies(case), None, load_arithmetics(f"{mine}:PART"))


def test_check_of_a_case_in_an_undeclared_dtype_is_refused_before_it_runs(
    mine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("equivtest.ranks.pool.Pool.run", None)
    case = repr(mixed("bfloat16", "float16"))
    monkeypatch.setattr(sys, "argv", ["equivtest", "check", "--arithmetic", f"{mine}:PART", "fsdp2_mixed_mlp", case])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2 and "it declares float32, bfloat16, but not float16: add" in capsys.readouterr().err


def mixed(param_dtype: str, reduce_dtype: str = "") -> MixedCase:
    return MixedCase(world_size=2, param_dtype=param_dtype, reduce_dtype=reduce_dtype)


@pytest.mark.parametrize(
    ("case", "dtypes", "expected"),
    [
        (mixed("bfloat16"), ("float32", "bfloat16"), True),
        (mixed("bfloat16", "float16"), ("float32", "bfloat16"), False),
        (mixed("float16"), ("float32", "bfloat16"), False),
        (mixed("float16"), ("float32",), True),  # for a run that names neither
        (mixed("bfloat16"), ("bfloat16",), False),
        (CASE, ("float32",), True),
        (CASE, ("float64", "bfloat16"), False),
    ],
)
def test_run_draws_only_cases_of_its_dtypes(case: Case, dtypes: tuple[str, ...], *, expected: bool) -> None:
    assert case.is_within(dtypes) == expected


def test_mixed_precision_cases_use_only_the_dtypes_of_the_run() -> None:
    """Examples and drawn cases, and those that fill the cells of float32 alone."""
    prop, dtypes = test_data_parallel.fsdp2_mixed_mlp, ("float32", "bfloat16")
    chunk = Chunk(3, dtypes, 0, 30, per_cell=2)
    cases = chunk_cases(prop, chunk)
    filled = fill(prop, chunk, [], short_of_draws(prop, chunk, []))
    assert len(cases) > 10 and filled and all(case.is_within(dtypes) for case in (*cases, *filled))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_bound_of_a_sum_in_a_wider_dtype_includes_the_rounding_to_store_it(num_ranks: int) -> None:
    operands = torch.randn(num_ranks, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    total = operands.float().sum(0)
    wide = TORCH_CPU | {"bfloat16": Arithmetic("bfloat16", accumulate="float32", reduce="float32")}
    with declared(wide):
        found = bound_reduction(operands, "sum", 1)

    assert found.allowed is not None
    assert bool(((total.bfloat16().double() - found.value).abs() <= found.allowed).all())
    assert bool(((total.double() * (1 + num_ranks * 2**-6) - found.value).abs() > found.allowed).any())
