"""Steps that clip by the norm of all gradients: any other norm is rejected, and so is a scaler that skips alone."""

from __future__ import annotations

import math

import pytest

from equivtest.programs.case import ModuleCase
from equivtest.programs.examples.mixture import AXES, MAX_NORM, SIZES
from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import judge
from tests.programs.wrong_norms import RIGHT_NORMS, WRONG_NORMS, Skips


def norm_case(name: str, mesh: tuple[int, int]) -> ModuleCase:
    """Returns a case of a step that clips the norm of gradients, by the class with this name.

    A class that scales the loss skips some of three steps.
    """
    step = {**RIGHT_NORMS, **WRONG_NORMS}[name]
    return ModuleCase(
        world_size=math.prod(mesh),
        mesh=mesh,
        axes=AXES,
        build=f"equivtest.programs.examples.mixture:{step.build}",
        parallelize=f"equivtest.programs.examples.mixture_plan:{step.parallelize}",
        x_shape=(SIZES[step.build],),
        optimizer="equivtest.programs.examples.mixture:sgd",
        step=f"tests.programs.wrong_norms:run_{name}",
        steps=3 if issubclass(step, Skips) else 1,
        max_norm=MAX_NORM,
        norm_type=step.norm_type,
        values=(("real", 0),),
    )


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
