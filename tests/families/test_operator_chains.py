"""Chains of operators on DTensors: what a case may be, what a strategy makes, and that torch is right in some."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from equivtest.cases.case import from_code
from equivtest.cases.values import draw
from equivtest.errors import Misuse
from equivtest.families.operators.chains.case import (
    CONTEXTS,
    LOCAL_MAP,
    MODULE,
    REDISTRIBUTE,
    SPECIALS,
    THROUGH_LOCAL,
    WRITE,
    ChainCase,
)
from equivtest.families.operators.chains.strategy import chain_cases
from equivtest.families.operators.chains.strategy_calls import OF_EACH_KIND, PARTS, REDUCTIONS, SPLITS, chains_of
from equivtest.oracle import expect
from equivtest.property import Space
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import check, judge
from tests.drawing import drawn
from tests.programs.contexts import PLANTED

TWICE = (("mul", ("x0",), (("other", 2.0),)), ("mul", ("y0",), (("other", -3),)))


def case_of(**fields: Any) -> ChainCase:
    base = {"world_size": 2, "operands": ((2, 3),), "placements": (("shard(1)",),), "steps": TWICE}
    return ChainCase(**{**base, "requires_grad": (0,), **fields})


@cache
def drawn_cases() -> tuple[ChainCase, ...]:
    return tuple(drawn(chain_cases(Space((1, 2, 4), ("float32", "float64"))), 80))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": ()}, "steps must be 1 to 6, got 0"),
        ({"steps": (("total", ("x0",), ()),)}, "a step must name an operator or one of .*, got 'total'"),
        ({"steps": (("neg", ("y0",), ()),)}, r"operands of step 0 must be some of x0, got \('y0',\)"),
        (
            {"steps": ((REDISTRIBUTE, ("x0",), (("placements", "partial(sum)"),)),)},
            "a step cannot redistribute to partial",
        ),
        ({"steps": (("mm", ("x0", "x0"), ()),)}, "chain does not take"),
        ({"context": "flattened mesh"}, r"a flattened mesh is made of two axes of all ranks: \(\)"),
        ({"context": "autocast", "values": (("real", 0),)}, "in autocast values must be dense"),
        ({"operator": "neg"}, "operator must be .*chain.*, got 'neg'"),
    ],
)
def test_error_for_an_invalid_chain_names_the_invalid_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Misuse, match=message):
        case_of(**fields)


def test_each_step_of_a_chain_is_expected_from_the_previous_result() -> None:
    case = case_of()
    x, tensors = draw(case, 0)["operand.0"].double(), expect(case, 0).tensors

    assert torch.equal(tensors["output.0"].value, 2 * x) and torch.equal(tensors["output.1"].value, -6 * x)
    assert tensors["output.1"].allowed is None and tensors["grad.operand.0"].allowed is None


def test_oracle_expects_a_write_through_a_view_in_the_base_tensor() -> None:
    case = case_of(steps=((WRITE, ("x0",), (("dim", 0), ("index", 1), ("factor", -3.0))),), requires_grad=())
    x, found = draw(case, 0)["operand.0"].double(), expect(case, 0).tensors["output.0"].value

    assert torch.equal(found, torch.stack([x[0], -3 * x[1]]))


def test_drawn_chains_have_all_kinds_of_steps() -> None:
    cases = drawn_cases()
    again = [case for case in cases if max(Counter(name for name, _, _ in case.steps).values()) > 1]

    assert 3 * len(again) > len(cases)
    assert {name for case in cases for name, _, _ in case.steps} >= {REDISTRIBUTE, THROUGH_LOCAL, WRITE, "mul", "add"}
    assert {len(case.steps) for case in cases} >= {2, 3, 4}
    assert {case.context for case in cases} == set(CONTEXTS)
    assert all(from_code(repr(case)) == case for case in cases)


@pytest.mark.ranks
def test_torch_passes_a_chain_of_all_special_steps(pool: Pool) -> None:
    steps = (
        ("sum", ("x0",), (("dim", 1), ("keepdim", True))),
        (REDISTRIBUTE, ("y0",), (("placements", "shard(0)"),)),
        (THROUGH_LOCAL, ("y1",), ()),
        (WRITE, ("y2",), (("dim0", 0), ("dim1", 1), ("factor", 2.0))),
        (LOCAL_MAP, ("y3",), (("placements", "replicate"), ("factor", -3.0))),
        (MODULE, ("y4",), (("placements", "shard(0)"), ("factor", 2.0))),
    )
    assert set(SPECIALS) <= {name for name, _, _ in steps}
    verdicts = check("dtensor_operator_chains", case_of(steps=steps), pool, shipped()["dtensor_operator_chains"].claims)

    assert all(verdict.kind == "holds" for verdict in verdicts)


def test_oracle_models_autocast_no_grad_and_implicit_replication() -> None:
    product = {"steps": (("mm", ("x0", "x1"), ()),), "operands": ((2, 3), (3, 2)), "placements": (("replicate",),) * 2}
    named = {context: case_of(context=context, **product) for context in CONTEXTS if context != "flattened mesh"}
    dtypes = {context: case.results[0].dtype for context, case in named.items()}

    assert not named["no_grad"].graded() and not named["inference_mode"].graded() and named[""].graded() == (0,)
    assert {context for context, dtype in dtypes.items() if dtype == "bfloat16"} == {"autocast"}
    assert [context for context, case in named.items() if case.plain == (1,)] == ["implicit_replication"]


@pytest.mark.ranks
@pytest.mark.parametrize("name", PLANTED)
def test_wrong_context_or_step_is_rejected_and_torch_passes(name: str, pool: Pool) -> None:
    case, claims = PLANTED[name], shipped()["dtensor_operator_chains"].claims

    assert any(verdict.failed for verdict in judge(f"tests.programs.contexts:{name}", case, pool, claims))
    assert {verdict.kind for verdict in judge("dtensor_operator_chains", case, pool, claims)} == {"holds"}


@pytest.mark.parametrize(("world_size", "number", "is_proved"), [(3, 1.0, False), (3, 3.0, True), (2, 1.0, True)])
def test_exact_result_is_required_only_if_ranks_can_divide_the_number_exactly(
    world_size: int, number: float, *, is_proved: bool
) -> None:
    steps = (("add", ("x0",), (("other", number),)), ("add", ("y0", "x0"), ()))
    case = case_of(world_size=world_size, placements=(("partial(sum)",),), steps=steps)

    assert (expect(case, 0).tensors["output.1"].allowed is None) == is_proved


@cache
def chains_of_a_gate() -> list[ChainCase]:
    return [chain for part in range(PARTS[2]) for chain in chains_of(Space((2,), ("float32",)), 1, part)]


def test_gate_has_each_ordered_pair_of_kinds_of_steps() -> None:
    pairs = {tuple(name for name, _, _ in chain.steps) for chain in chains_of_a_gate()}

    assert pairs >= set(itertools.product(OF_EACH_KIND, repeat=2))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gate_run_calls_operators_on_each_partial_result(reduction: str) -> None:
    found = [chain for chain in chains_of_a_gate() if chain.steps[0][0] == reduction and len(chain.steps) == 2]
    partial = [
        chain for chain in found if dict(chain.steps[0][2]) == {"dim": 0} and chain.placements == (("shard(0)",),)
    ]

    assert {chain.steps[1][0] for chain in partial} >= {"neg", "abs", "mul", "add", "sum", "neg in place"}


def test_gate_run_views_a_flattened_shard_behind_another_dim() -> None:
    found = {
        chain.steps[1][2] for chain in chains_of_a_gate() if [step[0] for step in chain.steps] == ["flatten", "view"]
    }

    assert found == {(("shape", shape),) for shape in SPLITS}
    assert any(chain.steps[0][0] == "flatten" and chain.placements == (("shard(1)",),) for chain in chains_of_a_gate())


@pytest.mark.parametrize("name", ["clamp", "cumsum", "mul", "roll"])
def test_gate_calls_an_operator_again_with_another_argument(name: str) -> None:
    pairs = [chain.steps for chain in chains_of_a_gate()]

    assert any(first[0] == second[0] == name and first[2] != second[2] for first, second in pairs)
