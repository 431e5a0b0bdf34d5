"""Claims about torch.distributed's collectives, each called by itself.

A failure here is the backend's: everything else that runs on it is built from these calls.
"""

from __future__ import annotations

from equivtest.cases.collective_calls import BUNDLES, WAITS, CollectivesCase
from equivtest.cases.special import NUM_SPECIAL
from equivtest.cases.strategies import collectives_cases
from equivtest.limits import DTYPES
from equivtest.property import Property
from equivtest.verdicts.claims import (
    agrees_on_all_ranks,
    does_not_touch_its_inputs,
    equals_unsharded,
    is_exact_without_reduction,
    repeats_itself,
)

ALL_SIZES = (0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 1000, 1025)
LARGE = 2**17 + 1


def on_all_ranks() -> tuple[CollectivesCase, ...]:
    """Every collective and reduction, in every dtype, on every number of ranks and every size but large ones."""
    parts = [(w, dtype, calls) for w in (1, 2, 3, 4) for dtype in DTYPES for calls in BUNDLES.values()]
    return tuple(
        CollectivesCase(
            world_size=world_size,
            dtype=dtype,
            collectives=tuple(call.name for call in calls),
            numels=ALL_SIZES,
            waits=WAITS[number % len(WAITS)],
            values=(("special", number % NUM_SPECIAL),),
        )
        for number, (world_size, dtype, calls) in enumerate(parts)
    )


def of_large_sizes() -> tuple[CollectivesCase, ...]:
    """Every collective once on a large size, in turn in each dtype and on each number of ranks above one."""
    return tuple(
        CollectivesCase(
            world_size=2 + number % 3,
            dtype=DTYPES[number % len(DTYPES)],
            collectives=tuple(call.name for call in calls),
            numels=(LARGE,),
            waits="async",
        )
        for number, calls in enumerate(BUNDLES.values())
    )


collectives = Property(
    subject="collectives",
    statement="Each collective of torch.distributed leaves on every rank what its documentation says.",
    source="torch/distributed/distributed_c10d.py, torch/distributed/_functional_collectives.py (2.13.0)",
    cases=collectives_cases,
    claims=(
        equals_unsharded,
        is_exact_without_reduction,
        agrees_on_all_ranks,
        does_not_touch_its_inputs,
        repeats_itself,
    ),
    examples=(*on_all_ranks(), *of_large_sizes()),
    weight=2,
    shards=False,
)
