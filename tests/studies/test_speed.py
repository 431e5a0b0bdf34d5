"""The benchmarks assert nothing themselves: what they stand on is asserted here."""

from __future__ import annotations

from equivtest.ranks.pool import Pool
from studies.speed.measure import draw_cases, main_properties, require_answers
from studies.speed.programs import CaseList
from studies.speed.throughput import VISIT


def test_speed_loop_imports_the_modules_that_define_its_cases(pool: Pool) -> None:
    [prop] = main_properties(["ddp_mlp"])
    listed = CaseList.of(1, draw_cases(prop, 1, 1))

    with Pool(max_worlds=1, visit=VISIT, beside=pool) as bare:
        require_answers(prop.subject, listed, bare.run(prop.subject, listed))
