"""Claims about DeepSpeed itself: the parameters that it partitions and fetches are the unsharded ones.

A failure here means that a model computes with other parameters than it was given. The installed release is judged.
There are no pinned examples, so that the strategy must find the failures.
"""

from __future__ import annotations

from equivtest.families.zero3.fetch.strategy import fetch_cases
from equivtest.property import Property
from equivtest.verdicts.claims import (
    agrees_on_all_ranks,
    does_not_touch_its_inputs,
    equals_unsharded,
    keeps_layout_of_parameter,
)

SOURCE = "deepspeed/runtime/zero/partition_parameters.py, class Init (0.19.8)"
CLAIMS = (equals_unsharded, agrees_on_all_ranks, keeps_layout_of_parameter, does_not_touch_its_inputs)

deepspeed_fetch_all_gather = Property(
    subject="deepspeed_fetch_all_gather",
    statement="Parameters that DeepSpeed partitions and fetches by all_gather are the unsharded parameters.",
    source=SOURCE,
    cases=fetch_cases,
    claims=CLAIMS,
    weight=5,
    requires="deepspeed",
)

deepspeed_fetch_all_reduce = Property(
    subject="deepspeed_fetch_all_reduce",
    statement="Parameters that DeepSpeed partitions and fetches by all_reduce are the unsharded parameters.",
    source=SOURCE + "; stage3_use_all_reduce_for_fetch_params",
    cases=fetch_cases,
    claims=CLAIMS,
    weight=5,
    requires="deepspeed",
)
