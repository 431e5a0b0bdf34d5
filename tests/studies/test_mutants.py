"""studies/mutants: each mutant differs from torch in one expression, and is planted where torch has registered it."""

from __future__ import annotations

import ast

import pytest
from torch.distributed.tensor._ops.utils import normalize_dim

from equivtest.families.scale.case import ScaleCase
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from studies import mutants
from studies.mutants import FOLDER, Mutant, Reached, Visit, changed, code_of, in_order, mutants_of

CASE = ScaleCase(world_size=2)
TENSOR = "distributed/tensor/"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a < b", "a <= b"),
        ("a is b", "a is not b"),
        ("a and b", "a or b"),
        ("not a", "a"),
        ("a // b", "a * b"),
        ("True", "False"),
        ("1", "2"),
        ("Shard(dim)", "Replicate()"),
        ("Replicate()", "Shard(0)"),
    ],
)
def test_expression_is_changed_to_another(before: str, after: str) -> None:
    by = changed(ast.parse(before, mode="eval").body)

    assert by is not None and ast.unparse(by) == after


def test_expression_without_another_meaning_is_left() -> None:
    assert changed(ast.parse("f(x)", mode="eval").body) is None


@pytest.mark.parametrize("file", [f"{TENSOR}_utils", f"{TENSOR}_ops/_embedding_ops", "optim/sgd"])
def test_mutant_is_the_function_of_torch_with_one_expression_changed(file: str) -> None:
    first, *_, last = mutants_of(file)

    for mutant in (first, last):
        code, own = code_of(mutant), function_of(mutant)
        assert (code.co_qualname, code.co_firstlineno) == mutant.function
        assert code != own and mutant.before != mutant.after


def function_of(mutant: Mutant) -> object:
    path = FOLDER / f"{mutant.file}.py"
    codes = mutants._codes_in(compile(path.read_text("utf-8"), str(path), "exec"))
    [code] = [each for each in codes if (each.co_qualname, each.co_firstlineno) == mutant.function]
    return code


def test_lines_of_torch_that_run_are_traced() -> None:
    lines: set[tuple[str, int]] = set()
    with mutants.traced("operators", lines):
        normalize_dim(-1, 2)

    assert {file for file, _ in lines} == {f"{TENSOR}_ops/utils"}


def test_planted_mutant_runs_wherever_torch_holds_the_function() -> None:
    name, right = "normalize_dim", normalize_dim.__code__
    places = mutants_of(f"{TENSOR}_ops/utils")
    mutant = next(each for each in places if each.function[0] == name and each.before == "dim + ndim")
    try:
        mutants.plant(mutant)
        assert (mutant.after, normalize_dim(-1, 3)) == ("dim - ndim", -4)
    finally:
        normalize_dim.__code__ = right
    assert normalize_dim(-1, 3) == 2


@pytest.mark.ranks
def test_case_in_which_torch_itself_is_rejected_does_not_count(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "rejects", lambda prop, known, case, pool: True)

    visit = Visit("scale", shipped()["scale"], CASE)
    assert mutants.judged(mutants_of(f"{TENSOR}_utils")[0], [visit], pool, 60) == ("green", 1)


def test_cases_that_reach_a_line_come_before_others_of_their_kind() -> None:
    first, second, other = (
        Visit(kind, shipped()["scale"], ScaleCase(world_size=size))
        for kind, size in (("scale", 1), ("scale", 2), ("other", 3))
    )

    assert in_order([first, second, other], Reached({mutants.name_of(second.case)}, {"scale"})) == [second, first]


def test_functions_that_a_decorator_has_made_are_changed() -> None:
    mutant = next(each for each in mutants_of("optim/optimizer") if each.function[0] == "_use_grad_for_differentiable")

    names = [code.co_qualname for _, code in mutants.replacements(mutant)]
    assert names.count("_use_grad_for_differentiable.<locals>._use_grad") > 5
