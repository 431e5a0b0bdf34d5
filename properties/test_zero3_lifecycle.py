"""Claims about parameters under the project's own ZeRO-3: any sequence of operations, judged after each operation.

A failure here means that a parameter had another value, another status or other memory than a parameter without
partitions. Look first at the first operation after which something differs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from equivtest.families.zero3.lifecycle.case import LifecycleCase
from equivtest.families.zero3.lifecycle.strategy import lifecycle_cases
from equivtest.property import Property
from equivtest.verdicts.claims import (
    agrees_on_all_ranks,
    does_not_touch_its_inputs,
    equals_unsharded,
    gradients_equal_unsharded,
    keeps_layout_of_parameter,
    repeats_itself,
    uses_only_collectives,
    uses_only_documented_memory,
)

SOURCE = (
    "Rajbhandari et al., ZeRO (2020), sections 5.3 and 7.2.2; "
    "deepspeed/runtime/zero/partition_parameters.py (0.19.8), GatheredParameters and ZeroParamStatus"
)
CLAIMS = (
    equals_unsharded,
    gradients_equal_unsharded,
    agrees_on_all_ranks,
    keeps_layout_of_parameter,
    does_not_touch_its_inputs,
    repeats_itself,
    uses_only_collectives,
    uses_only_documented_memory,
)
EXAMPLES = (
    # Two micro-batches and a step, then the new values are fetched; one parameter is frozen.
    LifecycleCase(
        world_size=2,
        parameters=((5,), (3, 2)),
        requires_grad=(True, False),
        operations=("fetch 0 1", "use 0 1", "use 1 0", "release 0 1", "step", "fetch 1 0", "use 0"),
    ),
    # A new value from outside goes to the partitions; what was saved before it comes back.
    LifecycleCase(
        world_size=3,
        parameters=((7,),),
        operations=("fetch 0", "save 0", "update 0", "use 0", "release 0", "fetch 0", "release 0", "load 0", "fetch 0"),
    ),
    # Refused operations in turn, and operations after a refusal: padded, 0-dim and empty parameters.
    LifecycleCase(
        world_size=4,
        parameters=((5,), (), (0, 3)),
        requires_grad=(True, True, True),
        operations=(
            *("use 0", "fail 0 1", "launch 0 1", "fetch 2 1", "use 0", "launch 2", "wait"),
            *("fetch 0", "use 2 1", "load 2", "release 0 1", "step"),
        ),
    ),
    # Two fetches under way at once, for which ranks wait in different order; dtypes do not mix.
    LifecycleCase(
        world_size=2,
        parameters=((3,), (2,), (4,)),
        requires_grad=(True, True, True),
        mixed_dtypes=True,
        operations=("fetch 0 1", "launch 0 2", "launch 1", "wait", "use 2 1 0", "release 2", "release 0", "fetch 2 2"),
    ),
)


def looked_at(cases: Iterable[LifecycleCase], collective: str) -> tuple[LifecycleCase, ...]:
    """Returns the cases with recorded collectives and measured memory, so that even a run of few cases judges both."""
    return tuple(replace(case, collective=collective, records=True, measures=True) for case in cases)


zero3_lifecycle_all_gather = Property(
    subject="zero3_lifecycle_all_gather",
    statement="Parameters under ZeRO-3, fetched by all_gather, equal unsharded parameters after every operation.",
    source=SOURCE,
    cases=partial(lifecycle_cases, collective="all_gather"),
    claims=CLAIMS,
    examples=looked_at(EXAMPLES, "all_gather"),
    weight=2,
)

zero3_lifecycle_all_reduce = Property(
    subject="zero3_lifecycle_all_reduce",
    statement="Parameters under ZeRO-3, fetched by all_reduce, equal unsharded parameters after every operation.",
    source=SOURCE,
    cases=partial(lifecycle_cases, collective="all_reduce"),
    claims=CLAIMS,
    examples=looked_at(EXAMPLES, "all_reduce"),
    weight=2,
)
