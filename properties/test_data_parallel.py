"""Claims about data parallelism of a perceptron: DDP, FSDP2, the project's own ZeRO-3, and meshes of two axes.

A failure here means that training on several ranks gives another model than training on the whole batch. Look first at
the earliest step, and there at the gradients.
"""

from __future__ import annotations

from functools import partial

from equivtest.base import limits
from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.families.training.data_parallel.case_refused import RefusedShardingCase
from equivtest.families.training.data_parallel.strategy import data_parallel_cases, refused_sharding_cases
from equivtest.families.training.mixed.case import NARROW, MixedCase
from equivtest.families.training.mixed.strategy import mixed_cases
from equivtest.families.training.two_axes.case import TwoAxisCase
from equivtest.families.training.two_axes.strategy import two_axis_cases
from equivtest.property import Property
from equivtest.verdicts.claims import refuses, repeats_itself, trains_like_unsharded, uses_only_collectives
from equivtest.verdicts.judging import DEFAULT_CLAIMS

CLAIMS = (*DEFAULT_CLAIMS, trains_like_unsharded, repeats_itself)
ZERO3 = "Rajbhandari et al., ZeRO (2020), sections 5.3 and 7.2.2; deepspeed/runtime/zero/stage3.py (0.19.8)"
BOTH = ("in_proj", "out_proj")
WEIGHTS = ("in_proj.weight", "out_proj.weight")
DTYPES = sorted(limits.DTYPES, key=lambda dtype: dtype not in ("float32", "bfloat16"))
ALL = ("x", "in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias")


def uneven(style: str, *, records: bool = False, fetch: str = "") -> DataParallelCase:
    """Returns a case in which three ranks shard 10, 5, 10 and 2 elements of the parameters, with two micro-batches."""
    return DataParallelCase(
        world_size=3, style=style, leading=(2,), in_features=2, hidden_features=5, out_features=2, biases=BOTH,
        requires_grad=ALL, micro_batches=2, optimizer="adamw", steps=3, weight_decay=0.25, fetch=fetch,
        records=records, values=(("dense", 0), ("real", 1)),
    )  # fmt: skip


def skipped_update(style: str, *, foreach: bool) -> DataParallelCase:
    """Returns a case whose first layer has no gradient in the second of three steps of AdamW.

    Its bias correction then counts one update less than that of the other layer.
    """
    return DataParallelCase(
        world_size=2, style=style, leading=(2,), in_features=2, hidden_features=4, out_features=2, biases=BOTH,
        requires_grad=ALL, optimizer="adamw", steps=3, stopped_steps=(2,), foreach=foreach, values=(("real", 1),),
    )  # fmt: skip


def on_four_ranks(style: str, fetch: str = "") -> tuple[DataParallelCase, ...]:
    """Returns cases in every dtype, with parameters that four ranks shard evenly and unevenly.

    The first four, in float32 and bfloat16, are examples; the others are for required cells. Drawn cases are seldom
    even.
    """
    return tuple(
        DataParallelCase(
            world_size=4, dtype=dtype, style=style, fetch=fetch, leading=(2,),
            in_features=4 if hidden == 4 else 3, hidden_features=hidden,
            out_features=4, optimizer="sgd", steps=2, values=(("dense", 0), ("real", 1)),
        )
        for dtype in DTYPES
        for hidden in (4, 7)
    )  # fmt: skip


def by_columns() -> tuple[DataParallelCase, ...]:
    """Returns cases in which three ranks have 2 of 6 and 1 of 3 columns each, and shard biases of 3 and 2 elements."""
    return tuple(
        DataParallelCase(
            world_size=3, dtype=dtype, style="fsdp2", by_columns=WEIGHTS, leading=(2,), in_features=6,
            hidden_features=3, out_features=2, biases=BOTH, requires_grad=ALL, micro_batches=2, optimizer="sgd",
            steps=3, momentum=0.5, clip_norm=1.0, values=(("dense", 0), ("real", 1)),
        )
        for dtype in limits.DTYPES
    )  # fmt: skip


def on_two_axes(style: str) -> tuple[TwoAxisCase, ...]:
    """Returns cases on two by two ranks in every dtype, float32 and bfloat16 first, with 5 and 8 hidden features."""
    return tuple(
        TwoAxisCase(
            world_size=4, mesh=(2, 2), dtype=dtype, style=style, leading=(2, 3), in_features=3,
            hidden_features=hidden, out_features=4, biases=BOTH, requires_grad=ALL, micro_batches=2,
            use_local_output=hidden == 8, wrapper="mesh" if style == "ddp_tp" else "group",
            optimizer="sgd", steps=3, momentum=0.5, values=(("dense", 0), ("real", 1)),
        )
        for dtype in DTYPES
        for hidden in (5, 8)
    )  # fmt: skip


def five_rows(style: str) -> TwoAxisCase:
    """Returns a recorded case in which two ranks of each mesh row shard five rows of parameters as 3 and 2, padded."""
    return TwoAxisCase(
        world_size=4, mesh=(2, 2), style=style, leading=(2,), micro_batches=2, in_features=3, hidden_features=5,
        out_features=4, biases=BOTH, use_local_output=style == "hsdp", requires_grad=ALL, records=True,
    )  # fmt: skip


def mixed(param_dtype: str, reduce_dtype: str) -> MixedCase:
    """Returns a case on three ranks in which the gradients of each micro-batch need more bits than bfloat16 has."""
    return MixedCase(
        world_size=3, param_dtype=param_dtype, reduce_dtype=reduce_dtype, output_dtype="float32", leading=(2,),
        in_features=2, hidden_features=5, out_features=2, biases=BOTH, requires_grad=ALL, micro_batches=2,
        values=(("dense", 0), ("wide-x", 0), ("real", 1)),
    )  # fmt: skip


ddp_mlp = Property(
    subject="ddp_mlp",
    statement="A perceptron under DistributedDataParallel trains as the unsharded one does on the whole batch.",
    source="torch/nn/parallel/distributed.py, class DistributedDataParallel (2.13.0)",
    cases=partial(data_parallel_cases, style="ddp"),
    claims=CLAIMS,
    examples=(uneven("ddp"), skipped_update("ddp", foreach=False)),
    weight=2,
    shards=False,
)

fsdp2_mlp = Property(
    subject="fsdp2_mlp",
    statement="A perceptron whose layers are fully sharded trains as the unsharded one does on the whole batch.",
    source="torch/distributed/fsdp/_fully_shard/_fully_shard.py, fully_shard (2.13.0)",
    cases=partial(data_parallel_cases, style="fsdp2"),
    claims=CLAIMS,
    examples=(uneven("fsdp2"), skipped_update("fsdp2", foreach=True), *on_four_ranks("fsdp2")[:4], *by_columns()),
    for_cells=on_four_ranks("fsdp2")[4:],
    weight=2,
)

fsdp2_mlp_refuses = Property(
    subject="fsdp2_mlp",
    statement="Every rank refuses a weight that cannot be sharded along the requested dim.",
    source="torch/distributed/fsdp/_fully_shard/_fully_shard.py, fully_shard: shard_placement_fn (2.13.0)",
    cases=refused_sharding_cases,
    claims=(refuses,),
    examples=(RefusedShardingCase(world_size=3, misfit="uneven", in_features=4, hidden_features=2),),
)

fsdp2_mixed_mlp = Property(
    subject="fsdp2_mixed_mlp",
    statement="A fully sharded perceptron with mixed precision trains as the unsharded one with the same casts.",
    source="torch/distributed/fsdp/_fully_shard/_fsdp_api.py, MixedPrecisionPolicy (2.13.0)",
    cases=mixed_cases,
    claims=CLAIMS,
    examples=tuple(mixed(param_dtype, reduce_dtype) for param_dtype in NARROW for reduce_dtype in ("", "float32")),
    weight=2,
    conclusive_dtypes=("float32",),
)

zero3_mlp_all_gather = Property(
    subject="zero3_mlp_all_gather",
    statement="A perceptron under ZeRO-3 that fetches by all_gather trains as the unsharded one on the whole batch.",
    source=ZERO3,
    cases=partial(data_parallel_cases, style="zero3", fetch="all_gather"),
    claims=(*CLAIMS, uses_only_collectives),
    examples=(uneven("zero3", fetch="all_gather", records=True), *on_four_ranks("zero3", "all_gather")[:4]),
    for_cells=on_four_ranks("zero3", "all_gather")[4:],
    weight=2,
)

zero3_mlp_all_reduce = Property(
    subject="zero3_mlp_all_reduce",
    statement="A perceptron under ZeRO-3 that fetches by all_reduce trains as the unsharded one on the whole batch.",
    source=ZERO3 + "; DeepSpeed PR 5420",
    cases=partial(data_parallel_cases, style="zero3", fetch="all_reduce"),
    claims=(*CLAIMS, uses_only_collectives),
    examples=(uneven("zero3", fetch="all_reduce", records=True), *on_four_ranks("zero3", "all_reduce")[:4]),
    for_cells=on_four_ranks("zero3", "all_reduce")[4:],
    weight=2,
)

fsdp2_tp_mlp = Property(
    subject="fsdp2_tp_mlp",
    statement="A perceptron under tensor parallelism on one axis and FSDP2 on another trains as the unsharded one.",
    source="torch's tutorial of two-dimensional parallelism; _init_sharding_spec_tp in _fully_shard/_fsdp_param.py "
    "(2.13.0)",
    cases=partial(two_axis_cases, style="fsdp2_tp"),
    claims=(*CLAIMS, uses_only_collectives),
    examples=(*on_two_axes("fsdp2_tp")[:4], five_rows("fsdp2_tp")),
    for_cells=on_two_axes("fsdp2_tp")[4:],
    weight=2,
)

ddp_tp_mlp = Property(
    subject="ddp_tp_mlp",
    statement="A perceptron under tensor parallelism on one axis and DDP on another trains as the unsharded one.",
    source="torch/nn/parallel/distributed.py, argument device_mesh; torch/distributed/tensor/parallel/ddp.py (2.13.0)",
    cases=partial(two_axis_cases, style="ddp_tp"),
    claims=CLAIMS,
    examples=on_two_axes("ddp_tp")[:4],
    for_cells=on_two_axes("ddp_tp")[4:],
)

hsdp_mlp = Property(
    subject="hsdp_mlp",
    statement="A perceptron sharded on one axis and replicated on another trains as the unsharded one.",
    source="torch/distributed/fsdp/_fully_shard/_fully_shard.py, fully_shard on a mesh of two axes (2.13.0)",
    cases=partial(two_axis_cases, style="hsdp"),
    claims=(*CLAIMS, uses_only_collectives),
    examples=(*on_two_axes("hsdp")[:4], five_rows("hsdp")),
    for_cells=on_two_axes("hsdp")[4:],
)
