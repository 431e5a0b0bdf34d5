"""Claims about ZeRO-3's two fetches: both make the same parameters whole.

A failure here means that a model computes with other parameters than it was given. Look first at the strides of
parameters whose number of elements is no multiple of the world size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from equivtest.cases.values.special import NUM_SPECIAL
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.families.zero3.fetch.strategy import fetch_cases, refused_fetch_cases
from equivtest.property import Property
from equivtest.verdicts.claims import (
    agrees_on_all_ranks,
    does_not_touch_its_inputs,
    equals_unsharded,
    is_exact_but_for_added_zeros,
    is_exact_without_reduction,
    is_the_identity_for_one_rank,
    keeps_layout_of_parameter,
    refuses,
    repeats_itself,
    uses_only_collectives,
)

SOURCE = "DeepSpeed PR 5420; deepspeed/runtime/zero/partition_parameters.py (0.19.8)"
CLAIMS = (
    equals_unsharded,
    agrees_on_all_ranks,
    keeps_layout_of_parameter,
    does_not_touch_its_inputs,
    is_the_identity_for_one_rank,
    repeats_itself,
    uses_only_collectives,
)
EXAMPLES = (
    # DeepSpeed PR 8158: a parameter behind a padded one held uninitialised memory for two years.
    FetchCase(world_size=2, parameters=((5,), (3,)), requires_grad=(True, True)),
    # Padded, smaller than the world size, empty and 0-dim, all in one fetch.
    FetchCase(
        world_size=4, parameters=((5,), (2,), (3, 0), (), (4, 2)), requires_grad=(True, False, True, True, False)
    ),
    # Every special value, in separate draws.
    *(
        FetchCase(
            world_size=3, dtype=dtype, parameters=((4,),), values=tuple(("special", n) for n in range(NUM_SPECIAL))
        )
        for dtype in ("float32", "float64")
    ),
    # Every value that the dtypes of 16 bits have; with three ranks the last partition is padded.
    *(
        FetchCase(world_size=world_size, dtype=dtype, parameters=((256, 256),), values=(("every-bit-pattern", 0),))
        for world_size in (1, 2, 3)
        for dtype in ("float16", "bfloat16")
    ),
)


def recorded(cases: Iterable[FetchCase], collective: str) -> tuple[FetchCase, ...]:
    """Returns the cases with recorded collectives, so that even a run of few cases judges the claim on collectives."""
    return tuple(replace(case, collective=collective, records=True) for case in cases)


zero3_fetch_all_gather = Property(
    subject="zero3_fetch_all_gather",
    statement="Parameters partitioned by ZeRO-3 and fetched by all_gather are the unsharded parameters.",
    source=SOURCE,
    cases=partial(fetch_cases, collective="all_gather"),
    claims=(*CLAIMS, is_exact_without_reduction),
    examples=recorded(EXAMPLES, "all_gather"),
    weight=5,
)

zero3_fetch_all_reduce = Property(
    subject="zero3_fetch_all_reduce",
    statement="Parameters partitioned by ZeRO-3 and fetched by all_reduce are the unsharded parameters.",
    source=SOURCE,
    cases=partial(fetch_cases, collective="all_reduce"),
    claims=(*CLAIMS, is_exact_but_for_added_zeros),
    examples=recorded(EXAMPLES, "all_reduce"),
    weight=5,
)

zero3_fetch_all_gather_refuses = Property(
    subject="zero3_fetch_all_gather",
    statement="Every rank refuses to fetch by all_gather several dtypes together, or parameters in flight.",
    source=SOURCE,
    cases=refused_fetch_cases,
    claims=(refuses,),
)

zero3_fetch_all_reduce_refuses = Property(
    subject="zero3_fetch_all_reduce",
    statement="Every rank refuses to fetch by all_reduce several dtypes together, or parameters in flight.",
    source=SOURCE,
    cases=refused_fetch_cases,
    claims=(refuses,),
)
