"""Claims about torch.distributed's collectives, each called by itself.

A failure here is the backend's: everything else that runs on it is built from these calls.
"""

from __future__ import annotations

from dataclasses import replace

from equivtest.families.collectives.case import BUNDLES, CALLS, WAITS, CollectivesCase
from equivtest.families.collectives.strategy import collectives_cases
from equivtest.kit.values.special import NUM_SPECIAL
from equivtest.limits import DTYPES
from equivtest.property import Property
from equivtest.verdicts.claims import (
    agrees_on_all_ranks,
    does_not_touch_its_inputs,
    equals_unsharded,
    is_exact_without_reduction,
    repeats_itself,
)

SIZES = ((1, 2, 3), (7, 8, 9), (31, 32, 33), (1000, 1025, 0))
LARGE = 2**17 + 1


def on_all_ranks() -> tuple[CollectivesCase, ...]:
    """Every collective and reduction in every dtype on every number of ranks, small and medium sizes in turn."""
    places = [(ranks, number, calls) for ranks in (1, 2, 3, 4) for number in range(len(DTYPES)) for calls in BUNDLES]
    return tuple(
        CollectivesCase(
            world_size=ranks,
            dtype=DTYPES[number],
            collectives=names_of(calls),
            numels=sizes_of(ranks, number),
            waits=WAITS[index % len(WAITS)],
            values=(("special", index % NUM_SPECIAL),),
        )
        for index, (ranks, number, calls) in enumerate(places)
    )


def sizes_of(ranks: int, number: int) -> tuple[int, ...]:
    """One of each row in turn; of every other row where there are so many ranks that a call takes milliseconds."""
    rows = SIZES if ranks < 3 else SIZES[(ranks + number) % 2 :: 2]
    return tuple(row[(ranks + number) % len(row)] for row in rows)


def of_large_sizes() -> tuple[CollectivesCase, ...]:
    """Every collective on one large size, each dtype in turn; on two ranks or three, as drawing it takes long."""
    return tuple(
        CollectivesCase(
            world_size=2 + index % 2,
            dtype=DTYPES[index % len(DTYPES)],
            collectives=names_of(calls),
            numels=(LARGE,),
            waits="async",
        )
        for index, calls in enumerate(BUNDLES)
    )


def in_a_row() -> tuple[CollectivesCase, ...]:
    """Thousands, one after the other and all in flight at once."""
    gathers = CollectivesCase(world_size=2, collectives=names_of("all_gather_into_tensor"), numels=(3,), times=2000)
    return gathers, replace(gathers, waits="together")


def strided() -> tuple[CollectivesCase, ...]:
    """Every collective by itself on every second or third element of memory, each dtype in turn."""
    return tuple(
        CollectivesCase(
            world_size=2, dtype=DTYPES[index % len(DTYPES)], collectives=(name,), numels=(3, 8), stride=2 + index % 2
        )
        for index, name in enumerate(CALLS)
    )


def names_of(bundle: str) -> tuple[str, ...]:
    return tuple(call.name for call in BUNDLES[bundle])


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
    examples=(*on_all_ranks(), *of_large_sizes(), *in_a_row(), *strided()),
    weight=2,
    shards=False,
)
