"""Gradients that are zeros in the unsharded module, and None in the parallel one."""

from __future__ import annotations

from typing import Any

import pytest

from equivtest.errors import Misuse
from equivtest.programs.case import ModuleCase
from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import check
from equivtest.verdicts.verdict import ShapeMismatch

HERE = "tests.programs.experts:"
EITHER = {"zero_or_none": ("experts.*",)}
STEPPED = {"optimizer": HERE + "adamw", "steps": 2, "values": (("real", 0),), "dtype": "float64"}


def case_of(parallelize: str, **fields: Any) -> ModuleCase:
    where = {"build": HERE + "Experts", "parallelize": HERE + parallelize}
    return ModuleCase(world_size=2, x_shape=(2, 3), batch="mean of parts", **where, **fields)


@pytest.mark.ranks
def test_missing_gradient_in_place_of_zeros_fails_and_says_what_to_do(pool: Pool) -> None:
    with pytest.raises(ShapeMismatch) as caught:
        check("module", case_of("skips_the_idle"), pool)

    message = str(caught.value)
    assert "expected  zeros: " in message and "actual    none: on this rank .grad of experts.1.weight" in message
    assert "zero_or_none=('experts.1.weight',)" in message


@pytest.mark.ranks
@pytest.mark.parametrize("steps", [{}, STEPPED], ids=["one backward", "training steps"])
def test_zero_or_none_accepts_a_missing_gradient_in_place_of_zeros(pool: Pool, steps: dict[str, Any]) -> None:
    verdicts = check("module", case_of("skips_the_idle", **EITHER, **steps), pool)

    assert {verdict.kind for verdict in verdicts} == {"holds"}


@pytest.mark.ranks
def test_zero_or_none_rejects_a_missing_nonzero_gradient(pool: Pool) -> None:
    with pytest.raises(ShapeMismatch, match=r"(?s)grad\.experts\.0\.weight.*expected  a tensor"):
        check("module", case_of("cuts_off_the_busy", **EITHER), pool)


def test_zero_or_none_with_an_unknown_parameter_name_raises_misuse() -> None:
    with pytest.raises(Misuse, match=r"zero_or_none must name parameters .*'expert' matches none of experts\.0"):
        case_of("skips_the_idle", zero_or_none=("expert",))
