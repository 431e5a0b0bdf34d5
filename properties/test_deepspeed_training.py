"""Claims about DeepSpeed itself: its engines train the same model as one process.

The installed release is judged.
"""

from __future__ import annotations

from equivtest.families.training.deepspeed.strategy import engine_cases, whole_engine_cases
from equivtest.property import Property
from equivtest.verdicts.claims import repeats_itself, trains_like_unsharded
from equivtest.verdicts.judging import DEFAULT_CLAIMS

SOURCE = "deepspeed/runtime/engine.py and runtime/zero/stage3.py (0.19.8)"
CLAIMS = (*DEFAULT_CLAIMS, trains_like_unsharded, repeats_itself)

deepspeed_mlp_all_gather = Property(
    subject="deepspeed_mlp_all_gather",
    statement="A perceptron under DeepSpeed's ZeRO-3 trains as the unsharded one does on the whole batch.",
    source=SOURCE,
    cases=engine_cases,
    claims=CLAIMS,
    weight=2,
    requires="deepspeed",
    conclusive_dtypes=("float32",),
)

deepspeed_mlp_all_reduce = Property(
    subject="deepspeed_mlp_all_reduce",
    statement="A perceptron under DeepSpeed's ZeRO-3 that fetches by all_reduce trains as the unsharded one does.",
    source=SOURCE + "; stage3_use_all_reduce_for_fetch_params",
    cases=engine_cases,
    claims=CLAIMS,
    weight=2,
    requires="deepspeed",
    conclusive_dtypes=("float32",),
)

deepspeed_mlp_stages_1_and_2 = Property(
    subject="deepspeed_mlp_stages_1_and_2",
    statement="A perceptron under DeepSpeed's ZeRO-1 and ZeRO-2 trains as the unsharded one does on the whole batch.",
    source="deepspeed/runtime/engine.py and runtime/zero/stage_1_and_2.py (0.19.8)",
    cases=whole_engine_cases,
    claims=CLAIMS,
    weight=2,
    shards=False,
    requires="deepspeed",
    conclusive_dtypes=("float32",),
)
