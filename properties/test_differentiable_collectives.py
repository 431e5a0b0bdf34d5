"""Claims about torch's collectives that have a backward, each called alone.

A failure here means that a gradient through a collective is wrong.
"""

from __future__ import annotations

from equivtest.base.limits import DTYPES
from equivtest.families.differentiable.case import EVERYWHERE, OF_WORLD, DifferentiableCase
from equivtest.families.differentiable.strategy import differentiable_cases
from equivtest.property import Property
from equivtest.verdicts.claims import (
    does_not_touch_its_inputs,
    equals_unsharded,
    gradients_equal_unsharded,
    repeats_itself,
)

NUMELS = (3, 2, 1, 0)


def names_on(ranks: int, *, is_world: bool) -> tuple[str, ...]:
    """Returns the collectives to call on `ranks` ranks: all whose gradients torch gets right in such a group.

    Args:
        is_world: True if the group is the default group, with all processes.
    """
    names = (*EVERYWHERE, *OF_WORLD) if is_world else (*EVERYWHERE,)
    return tuple(name for name in names if ranks != 3 or not name.endswith("_avg"))


def in_the_world() -> tuple[DifferentiableCase, ...]:
    """Returns every collective on every number of ranks with every root; dtypes and sizes alternate."""
    return tuple(
        DifferentiableCase(
            world_size=ranks,
            dtype=DTYPES[(ranks + index) % len(DTYPES)],
            numel=NUMELS[index],
            collectives=names_on(ranks, is_world=True),
            repeats=index == 0,
        )
        for ranks in (1, 2, 3, 4)
        for index in range(len(NUMELS))
    )


def in_groups() -> tuple[DifferentiableCase, ...]:
    """Returns cases like `in_the_world` in groups whose ranks have other numbers in the world."""
    return tuple(
        DifferentiableCase(
            world_size=len(members),
            dtype=DTYPES[index % len(DTYPES)],
            numel=NUMELS[index],
            collectives=names_on(len(members), is_world=False),
            members=members,
        )
        for index, members in enumerate(((1, 2), (0, 2), (1,), (1, 2, 3)))
    )


differentiable_collectives = Property(
    subject="differentiable_collectives",
    statement="Each differentiable collective leaves on every rank what its documentation says, and its backward is "
    "the adjoint of its forward.",
    source="torch/distributed/nn/functional.py, torch/distributed/_functional_collectives.py (2.13.0)",
    cases=differentiable_cases,
    claims=(equals_unsharded, gradients_equal_unsharded, does_not_touch_its_inputs, repeats_itself),
    examples=(*in_the_world(), *in_groups()),
    shards=False,
)
