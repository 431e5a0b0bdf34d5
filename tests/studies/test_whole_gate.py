"""Wrong operators planted in torch: each has a program that shows it, and a case rejects one of them.

`python -m studies.whole_gate` runs a whole gate for each.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.distributed.tensor import Partial

from equivtest.families.operators.case import OperatorCase
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import judge
from tests.planted.shown import program
from tests.planted.subjects import WRONG, wrong_torch


def test_each_wrong_operator_has_a_program_of_dtensor_alone() -> None:
    assert len(WRONG) == 326
    assert all(callable(program(name)) for name in WRONG)


@pytest.mark.ranks
def test_argmax_that_counts_shards_as_even_is_rejected(pool: Pool) -> None:
    subject = "tests.planted.subjects:place_by_even_shards__dtensor_operators"
    claims = shipped()["dtensor_operators"].claims
    of_three = OperatorCase(
        world_size=2, operator="argmax", operands=((3,),), arguments=(("dim", 0),), placements=(("shard(0)",),)
    )
    cases = [replace(of_three, values=(("dense", seed),)) for seed in range(12)]

    assert any(verdict.failed for case in cases for verdict in judge(subject, case, pool, claims))
    assert not any(verdict.failed for case in cases[:3] for verdict in judge("dtensor_operators", case, pool, claims))


def test_wrong_operator_is_removed_after_its_run() -> None:
    before = Partial._reduce_shard_value
    with wrong_torch(WRONG["averages_scattered_as_sums"]):
        assert Partial._reduce_shard_value is not before

    assert Partial._reduce_shard_value is before
