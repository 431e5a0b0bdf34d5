"""The benchmarks assert nothing themselves: what they stand on is asserted here."""

from __future__ import annotations

import pytest

from equivtest.ranks.pool import Pool
from studies.speed.measure import RankFailed, draw_cases, main_properties, require_answers
from studies.speed.programs import CaseList
from studies.speed.throughput import VISIT, run_bare


def test_the_bare_loop_imports_what_its_cases_need(pool: Pool) -> None:
    """The class of these lies with their subject, and is not known to a fresh rank."""
    [prop] = main_properties(["ddp_mlp"])
    listed = CaseList.of(1, draw_cases(prop, 1, 1))

    with Pool(max_worlds=1, visit=VISIT, beside=pool) as bare:
        require_answers(prop.subject, listed, bare.run(prop.subject, listed))


def test_a_loop_that_judges_rejects_what_is_wrong_and_one_that_does_not_lets_it_pass(pool: Pool) -> None:
    """Or the harness would be compared with a loop that has less to do."""
    [prop] = main_properties(["rowwise_linear"])
    cases, wrong = draw_cases(prop, 2, 6), "tests.defects.linear.layers:bias_on_every_rank"

    with Pool(max_worlds=1, visit=VISIT, beside=pool) as bare:
        run_bare(bare, prop.subject, cases, judged=True)
        run_bare(bare, wrong, cases)
        with pytest.raises(RankFailed, match="AssertionError"):
            run_bare(bare, wrong, cases, judged=True)
