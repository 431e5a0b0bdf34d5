"""Draws cases of differentiable collectives."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from equivtest.cases.picks import pick, pick_run
from equivtest.families.differentiable.case import EVERYWHERE, OF_AVERAGES, OF_WORLD, DifferentiableCase
from equivtest.property import Space

NUMELS = (1, 2, 3, 7, 0, 33)
TAKEN = (False, True, True, True)
MODES = (("dense",), ("dense", "dense"))
ALONE = (None,) * 18 + (*OF_WORLD, *OF_AVERAGES)
"""The only collective of a case; None: the case has most collectives.

One case in four has only one, which some torch release gets wrong in some group.
"""


@st.composite
def differentiable_cases(draw: DrawFn, space: Space) -> DifferentiableCase:
    """Draws cases, most of them with most of the collectives. Shrinks to one collective on one element."""
    world_size = pick(draw, "world_size", space.world_sizes)
    dtype, numel = pick(draw, "dtype", space.dtypes), pick(draw, "numel", NUMELS)
    alone = pick(draw, "alone", ALONE)
    taken = [name for name in (*EVERYWHERE, *OF_WORLD) if pick(draw, name, TAKEN)]
    fields = pick_run(draw, world_size, MODES, records=())
    is_power = world_size & (world_size - 1) == 0
    names = [name for name in ((alone,) if alone else taken) if is_power or not name.endswith("_avg")]
    if not alone and fields["members"]:
        names = [name for name in names if name in EVERYWHERE]
    return DifferentiableCase(
        world_size=world_size, dtype=dtype, numel=numel, collectives=tuple(names) or ("nn_all_reduce",), **fields
    )
