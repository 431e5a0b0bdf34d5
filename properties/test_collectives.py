"""Claims about torch.distributed's collectives, one call at a time.

A failure here is a defect of the backend. Everything else that runs on the backend is built from these calls.
"""

from __future__ import annotations

from dataclasses import replace

from equivtest.base.limits import DTYPES
from equivtest.cases.values.special import NUM_SPECIAL
from equivtest.families.collectives.case import BUNDLES, CALLS, GROUP_FORMS, WAITS, CollectivesCase
from equivtest.families.collectives.strategy import collectives_cases
from equivtest.property import Property
from equivtest.tensors import DTYPES as DTYPES_OF
from equivtest.verdicts.claims import (
    agrees_on_all_ranks,
    does_not_touch_its_inputs,
    equals_unsharded,
    is_exact_without_reduction,
    repeats_itself,
)

SIZES = ((1, 2, 3), (7, 8, 9), (31, 32, 33), (1000, 1025, 0))
OFFSETS = (0, 1, 0, 5)
LARGE = 2**17 + 1
LARGEST_BYTES = 2**22
MANY_RANKS = 8
MOVES_LITTLE = (*(name for name in CALLS if name.endswith(("object", "object_list"))), "barrier", "monitored_barrier")
"""Collectives of Python objects, and collectives without elements."""
WITH_ENDS = ("broadcast", "scatter", "gather", "reduce", "all_to_all", "tags")
"""Bundles whose collectives have a root, or send to one rank."""
FIRST_OF_EACH = tuple({call.function: name for name, call in reversed(CALLS.items())}.values())[::-1]
"""One collective of each function, for cases that take too long with every reduction."""


def on_all_ranks() -> tuple[CollectivesCase, ...]:
    """Returns every collective and reduction in every dtype on every number of ranks, on small and medium sizes."""
    places = [(ranks, number, calls) for ranks in (1, 2, 3, 4) for number in range(len(DTYPES)) for calls in BUNDLES]
    return tuple(
        CollectivesCase(
            world_size=ranks,
            dtype=DTYPES[number],
            collectives=names_of(calls),
            numels=sizes_of(ranks, number),
            waits=WAITS[index % len(WAITS)],
            offset=OFFSETS[(ranks + number) % len(OFFSETS)],
            values=(("special", index % NUM_SPECIAL),),
            group_form=GROUP_FORMS[index % len(GROUP_FORMS)],
        )
        for index, (ranks, number, calls) in enumerate(places)
    )


def sizes_of(ranks: int, number: int) -> tuple[int, ...]:
    """Returns one size of each row of SIZES; on three or more ranks, where calls are slow, only of every second row."""
    rows = SIZES if ranks < 3 else SIZES[(ranks + number) % 2 :: 2]
    return tuple(row[(ranks + number) % len(row)] for row in rows)


def of_large_sizes() -> tuple[CollectivesCase, ...]:
    """Returns every collective on one large size, each dtype in turn; on two ranks only, because drawing takes long."""
    return tuple(
        CollectivesCase(
            world_size=2,
            dtype=DTYPES[index % len(DTYPES)],
            collectives=names_of(calls),
            numels=(LARGE,),
            waits="async",
        )
        for index, calls in enumerate(BUNDLES)
    )


def of_largest_sizes() -> tuple[CollectivesCase, ...]:
    """Returns one collective of each function on tensors of 4 MiB plus one element.

    Reductions are in float64, which has the fewest elements in 4 MiB.
    """
    return tuple(
        CollectivesCase(
            world_size=2,
            dtype=dtype,
            collectives=names,
            numels=(LARGEST_BYTES // DTYPES_OF[dtype].itemsize + 1,),
            waits="async",
        )
        for calls in BUNDLES
        if (names := tuple(name for name in names_of(calls) if name in FIRST_OF_EACH and name not in MOVES_LITTLE))
        for dtype in ("float64" if CALLS[names[0]].op else "float32",)
    )


def in_a_row() -> tuple[CollectivesCase, ...]:
    """Returns cases of 2,000 calls of one collective: one after the other, and all in flight at once."""
    gathers = CollectivesCase(world_size=2, collectives=names_of("all_gather_into_tensor"), numels=(3,), times=2000)
    return gathers, replace(gathers, waits="together")


def strided() -> tuple[CollectivesCase, ...]:
    """Returns one collective of each function on tensors with strides of 2 or 3 elements, each dtype in turn."""
    return tuple(
        CollectivesCase(
            world_size=2, dtype=DTYPES[index % len(DTYPES)], collectives=(name,), numels=(3, 8), stride=2 + index % 2
        )
        for index, name in enumerate(FIRST_OF_EACH)
    )


def not_row_major() -> tuple[CollectivesCase, ...]:
    """Returns every collective on transposed elements and on elements with the channels last, each dtype in turn."""
    return tuple(
        CollectivesCase(
            world_size=2 + index % 2,
            dtype=DTYPES[(index + number) % len(DTYPES)],
            collectives=names_of(calls),
            numels=(6, 24),
            order=order,
        )
        for index, calls in enumerate(BUNDLES)
        for number, order in enumerate(("transposed", "channels_last"))
    )


def in_memory_of_before() -> tuple[CollectivesCase, ...]:
    """Returns every collective called twice on the same memory, which is kept, or freed and allocated again."""
    return tuple(
        CollectivesCase(
            world_size=2 + (index + number) % 2,
            dtype=DTYPES[(index + 2 * number) % len(DTYPES)],
            collectives=names_of(calls),
            numels=(9, 33, 1025),
            waits=("at_once", "async")[(index // 2 + number) % 2],
            memory=memory,
        )
        for index, calls in enumerate(BUNDLES)
        for number, memory in enumerate(("kept", "freed"))
    )


def on_many_ranks() -> tuple[CollectivesCase, ...]:
    """Returns every collective on more ranks than the profiles have, each dtype in turn."""
    return tuple(
        CollectivesCase(
            world_size=MANY_RANKS,
            dtype=DTYPES[index % len(DTYPES)],
            collectives=names_of(calls),
            numels=(7,),
            waits=WAITS[index % len(WAITS)],
            values=(("special", index % NUM_SPECIAL),),
        )
        for index, calls in enumerate(BUNDLES)
    )


def in_groups() -> tuple[CollectivesCase, ...]:
    """Returns collectives in a group whose ranks have other numbers in the world.

    Functional collectives get each form of the group. Others name ranks by their numbers in the world.
    """
    forms = [(bundle, form) for bundle in ("functional", "functional moves") for form in GROUP_FORMS]
    return tuple(
        CollectivesCase(
            world_size=2, members=(1, 2), collectives=names_of(bundle), numels=(2, 7), waits="async", group_form=form
        )
        for bundle, form in (*forms, *((bundle, "name") for bundle in WITH_ENDS))
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
    examples=(
        *on_all_ranks(),
        *of_large_sizes(),
        *of_largest_sizes(),
        *in_a_row(),
        *strided(),
        *not_row_major(),
        *in_memory_of_before(),
        *on_many_ranks(),
        *in_groups(),
    ),
    weight=2,
    shards=False,
)
