"""The outcome of a drawn case of an operator."""

from __future__ import annotations

import pytest

from equivtest.families.operators.case import OperatorCase
from equivtest.verdicts.verdict import Judgement, Verdict
from studies.operator_coverage import fate_of, outcome_of


@pytest.mark.parametrize(
    ("kinds", "signs", "expected"),
    [
        ({"gradients_equal_unsharded": "value", "agrees_on_all_ranks": "replica"}, set(), "wrong"),
        ({"equals_unsharded": "holds", "gradients_equal_unsharded": "value"}, set(), "wrong gradient"),
        ({"equals_unsharded": "timed_out"}, set(), "hangs"),
        ({"equals_unsharded": "inconclusive", "agrees_on_all_ranks": "holds"}, {("forward", "R")}, "refused"),
        ({"equals_unsharded": "value"}, {("gradient", "R")}, "wrong"),
        ({"equals_unsharded": "inconclusive"}, {("forward", "?")}, "holds"),
    ],
)
def test_worst_verdict_decides_the_outcome_of_an_operator_case(
    kinds: dict[str, str], signs: set[tuple[str, str]], expected: str
) -> None:
    case = OperatorCase(world_size=1)
    verdicts = [
        Verdict(claim=claim, subject="dtensor_operators", case=case, judgement=Judgement(kind), draw=0)
        for claim, kind in kinds.items()
    ]

    assert outcome_of(verdicts, signs)[0] == expected


@pytest.mark.parametrize(
    ("signs", "fate"), [("R~", "judged"), ("?R", "refused by torch"), ("?", "undecided"), ("K", "judged")]
)
def test_operator_counts_as_judged_if_one_draw_is_conclusive(signs: str, fate: str) -> None:
    assert fate_of({sign: int(sign in signs) for sign in "=~?RKX"}) == fate
