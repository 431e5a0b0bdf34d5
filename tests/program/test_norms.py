"""Steps that clip by the norm of all gradients: any other norm is rejected, and so is a scaler that skips alone."""

from __future__ import annotations

import pytest

from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import judge
from studies.step_defects import norm_case
from tests.programs.wrong_norms import RIGHT_NORMS


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("wrong", "mesh", "tensor"),
    [
        ("ReplicasOfGroupsCounted", (1, 2), "output.total_norm"),
        ("OwnNormOfStages", (2, 1), "output.total_norm"),
        ("OwnLargest", (1, 2), "output.total_norm"),
        ("OwnOverflow", (1, 2), "step2.param.whole"),
    ],
)
def test_total_norm_of_a_wrong_set_of_gradients_is_rejected(
    pool: Pool, wrong: str, mesh: tuple[int, int], tensor: str
) -> None:
    verdicts = judge("module", norm_case(wrong, mesh), pool)

    assert tensor in {each.tensor for verdict in verdicts for each in verdict.judgement.mismatches}


@pytest.mark.ranks
@pytest.mark.parametrize("right", RIGHT_NORMS)
def test_right_total_norm_of_all_gradients_passes(pool: Pool, right: str) -> None:
    assert {verdict.kind for verdict in judge("module", norm_case(right, (2, 2)), pool)} == {"holds"}
