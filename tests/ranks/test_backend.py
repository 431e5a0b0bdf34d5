"""A third-party backend, registered by a module: judged like gloo, and rejected if it is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from equivtest.cases.case import Case
from equivtest.families.linear.case import LinearCase
from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.ranks.backend import Backend
from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import check
from equivtest.verdicts.verdict import ValueMismatch
from tests.programs.backend import OFF_BY_ONE

pytestmark = pytest.mark.ranks
BACKEND = Backend("wrapper", imports=("tests.programs.backend",))
LINEAR = LinearCase(world_size=2, style="rowwise", in_features=4, out_features=3, records=True)
FETCH = FetchCase(world_size=2, parameters=((5,),), requires_grad=(True,), collective="all_gather", records=True)


@pytest.fixture(scope="module")
def wrapper(pool: Pool) -> Iterator[Pool]:
    with Pool(BACKEND, beside=pool) as wrapped:
        yield wrapped


@pytest.mark.parametrize(
    ("subject", "case"),
    [
        ("rowwise_linear", LINEAR),
        ("zero3_fetch_all_reduce", replace(FETCH, world_size=3, collective="all_reduce")),
        ("zero3_fetch_all_gather", FETCH),
        ("ddp_mlp", DataParallelCase(world_size=2, optimizer="sgd", steps=2)),
    ],
)
def test_python_process_group_passes_the_cases_that_gloo_passes(subject: str, case: Case, wrapper: Pool) -> None:
    judged = {verdict.claim for verdict in check(subject, case, wrapper)}
    assert "equals_unsharded" in judged and "uses_only_collectives" not in judged


def test_message_names_the_element_that_a_wrong_all_reduce_computed(pool: Pool) -> None:
    with Pool(BACKEND, environment={OFF_BY_ONE: "1"}, beside=pool) as wrong, pytest.raises(ValueMismatch) as caught:
        check("rowwise_linear", LINEAR, wrong)
    assert "global (0, 2)" in str(caught.value) and "actual - expected = 1 at every wrong element" in str(caught.value)
