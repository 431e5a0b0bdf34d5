"""Wrong rules planted in DTensor: one of each kind exists, and some are rejected.

`python -m studies.operator_defects` searches for all.
"""

from __future__ import annotations

import pytest
from torch.distributed.tensor import DTensor

from equivtest.families.operators.case import OperatorCase
from equivtest.families.operators.case_table import OPERATORS
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import judge
from tests.planted.rules import WRONG, planted

SMALLEST = {
    "gradient_on_every_rank": OperatorCase(world_size=2, operator="sum", requires_grad=(0,)),
    "first_rank_says_all": OperatorCase(
        world_size=2, operator="all of bools", values=(("dense", 23),), placements=(("shard(0)",),)
    ),
    "extrema_not_swapped": OperatorCase(world_size=2, operator="neg", placements=(("partial(max)",),)),
}
"""The fewest seconds of all; each of another kind."""


@pytest.mark.ranks
@pytest.mark.parametrize("name", SMALLEST)
def test_wrong_sharding_rule_is_rejected_and_torchs_rule_passes(name: str, pool: Pool) -> None:
    case, claims = SMALLEST[name], shipped()["dtensor_operators"].claims

    assert any(verdict.failed for verdict in judge(f"tests.planted.rules:{name}", case, pool, claims))
    assert not any(verdict.failed for verdict in judge("dtensor_operators", case, pool, claims))


def test_wrong_sharding_rules_cover_ten_kinds_of_mistakes() -> None:
    assert len(WRONG) >= 40 and len({wrong.kind for wrong in WRONG.values()}) >= 10
    assert {wrong.operator for wrong in WRONG.values()} <= OPERATORS.keys()


def test_wrong_sharding_rule_is_removed_after_its_run() -> None:
    propagator = DTensor._op_dispatcher.sharding_propagator
    wrong = WRONG["own_parts_softmax"]
    [op] = wrong.ops
    before = propagator.op_strategy_funcs[op]
    with planted(wrong):
        assert propagator.op_strategy_funcs[op] is not before

    assert propagator.op_strategy_funcs[op] is before
