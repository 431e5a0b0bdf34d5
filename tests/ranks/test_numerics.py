"""Arithmetic that a backend may declare, and errors that lean to one side, in process groups with such arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from equivtest.cases.case import Case
from equivtest.families.embedding.case import EmbeddingCase
from equivtest.families.linear.case import LinearCase
from equivtest.families.redistribute.case import RedistributeCase
from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.property import Property
from equivtest.ranks.backend import Backend
from equivtest.ranks.pool import Pool
from equivtest.verdicts.claims import equals_unsharded
from equivtest.verdicts.judging import judge
from properties import test_data_parallel, test_embedding, test_redistribute, test_tensor_parallel, test_zero3_fetch
from tests.programs.planted import FAULT

pytestmark = pytest.mark.ranks
HERE = "tests.programs.deviating"
SUMS = (("dense", 0), ("real", 1), ("real", 2))
PERCEPTRON = DataParallelCase(
    world_size=3, leading=(4,), in_features=8, hidden_features=8, out_features=8, biases=("in_proj", "out_proj"),
    requires_grad=("in_proj.weight", "out_proj.weight"), optimizer="sgd", steps=2, repeats=True,
    values=(("real", 0), ("real", 1)),
)  # fmt: skip
PARTIAL = RedistributeCase(
    world_size=3, shape=(9, 10), source=("partial(sum)",), target=("replicate",), repeats=True, values=SUMS[1:]
)
ROWWISE = LinearCase(world_size=3, style="rowwise", leading=(9,), in_features=9, out_features=9, repeats=True)
SUBNORMALS = (10, 11, 12, 13)
"""Numbers of the smallest and largest subnormal numbers among `special_patterns`: seeds of special draws."""
SPECIAL = tuple(("special", number) for number in SUBNORMALS)
FETCH = FetchCase(world_size=3, parameters=((5, 3),), requires_grad=(True,), collective="all_reduce", values=SPECIAL)
BUT_FOR_ZEROS = {"equals_unsharded": "value", "is_exact_but_for_added_zeros": "bits"}
ROWS = EmbeddingCase(
    world_size=3, style="rowwise", leading=(7,), num_embeddings=5, embedding_dim=4, requires_grad=(), values=SPECIAL
)


@contextmanager
def computing(pool: Pool, otherwise: str, declaration: str = "") -> Iterator[Pool]:
    """Ranks on the process group that computes so, judged by what it declares."""
    arithmetic = f"tests.programs.planted_arithmetic:{declaration}" if declaration else ""
    backend = Backend("planted", imports=(HERE,), arithmetic=arithmetic)
    with Pool(backend, environment={FAULT: otherwise}, beside=pool) as found:
        yield found


@pytest.fixture(scope="module", params=["", "VARYING"], ids=["undeclared", "declared"])
def varying(request: pytest.FixtureRequest, pool: Pool) -> Iterator[Pool]:
    with computing(pool, "order_varies", request.param) as found:
        yield found


@pytest.fixture(scope="module", params=["", "FLUSHING"], ids=["undeclared", "declared"])
def flushing(request: pytest.FixtureRequest, pool: Pool) -> Iterator[Pool]:
    with computing(pool, "flushes", request.param) as found:
        yield found


def kinds_of(prop: Property, case: Case, pool: Pool) -> dict[str, str]:
    verdicts = judge(prop.subject, case, pool, prop.claims)
    assert {verdict.kind for verdict in verdicts if not verdict.failed} == {"holds"}
    return {verdict.claim: verdict.kind for verdict in verdicts if verdict.failed}


@pytest.mark.parametrize(
    ("prop", "case"),
    [
        (test_redistribute.redistribute, PARTIAL),
        (test_redistribute.redistribute, replace(PARTIAL, dtype="bfloat16")),
        (test_tensor_parallel.rowwise_linear, replace(ROWWISE, values=SUMS[1:])),
        (test_data_parallel.ddp_mlp, PERCEPTRON),
    ],
)
def test_sums_in_an_order_that_varies_between_calls_fail_unless_the_backend_declares_it(
    prop: Property, case: Case, varying: Pool
) -> None:
    declares = bool(varying.backend.arithmetic)
    assert kinds_of(prop, case, varying) == ({} if declares else {"repeats_itself": "repeat"})


def test_exact_data_passes_on_a_backend_whose_order_of_sums_varies(varying: Pool) -> None:
    assert not kinds_of(test_tensor_parallel.rowwise_linear, replace(ROWWISE, values=SUMS), varying)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("prop", "case", "claims"),
    [
        (test_zero3_fetch.zero3_fetch_all_reduce, FETCH, BUT_FOR_ZEROS),
        (test_embedding.rowwise_embedding, ROWS, BUT_FOR_ZEROS),
    ],
)
def test_flushed_subnormals_fail_unless_the_backend_declares_them(
    prop: Property, case: Case, claims: dict[str, str], dtype: str, flushing: Pool
) -> None:
    declares = bool(flushing.backend.arithmetic)
    assert kinds_of(prop, replace(case, dtype=dtype), flushing) == ({} if declares else claims)


def test_flushing_a_copied_subnormal_fails_although_the_backend_declares_flushing(flushing: Pool) -> None:
    subject = "tests.defects.zero3_fetch.memory:flushes_subnormals"
    prop = replace(test_zero3_fetch.zero3_fetch_all_gather, subject=subject)
    failing = kinds_of(prop, replace(FETCH, collective="all_gather"), flushing)
    assert failing == {"equals_unsharded": "value", "is_exact_without_reduction": "bits"}


def test_sums_truncated_toward_zero_fail_although_each_is_within_its_bound(pool: Pool) -> None:
    cases = [case for case in test_redistribute.of_many_elements() if case.dtype == "bfloat16" and case.world_size > 2]
    with computing(pool, "cuts_toward_zero") as cutting:
        verdicts = [verdict for case in cases for verdict in judge("redistribute", case, cutting, [equals_unsharded])]
    reduced = [verdict for verdict in verdicts if verdict.case.target == ("replicate",)]
    assert {verdict.kind for verdict in reduced} == {"value"} and max(
        verdict.judgement.margin for verdict in reduced
    ) < 1
    assert all("mostly on one side of zero" in verdict.judgement.mismatches[0].actual for verdict in reduced)


def test_errors_of_sums_rounded_to_nearest_do_not_lean_to_one_side(varying: Pool) -> None:
    cases = test_redistribute.of_many_elements()
    verdicts = [verdict for case in cases for verdict in judge("redistribute", case, varying)]
    assert {verdict.kind for verdict in verdicts} == {"holds"}
