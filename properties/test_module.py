"""Claims about a user's own module, shown on examples; copy this file and name your module.

A failure here means that the parallelized module computes another function than the unsharded one. Look first at
tensors that every rank adds, before or after the sum over the ranks.
"""

from __future__ import annotations

import math
from typing import Any

from equivtest.base import limits
from equivtest.module import ids, module_property, real, targets
from equivtest.programs.case import ModuleCase

BUILD = "equivtest.programs.examples.gated:gated_block"
PARALLELIZE = "equivtest.programs.examples.plans:tensor_parallel"

gated_block = module_property(
    BUILD,
    PARALLELIZE,
    x_shapes=((1, 2), (2, 2), (3, 2), (2, 3, 2), (5, 2)),
    examples=[ModuleCase(world_size=4, build=BUILD, parallelize=PARALLELIZE, x_shape=(2, 3, 2), largest=3)],
)

# Two blocks of the same shapes, along two axes of a mesh whose submeshes have the same shape too.
blocks_along_each_axis = module_property(
    "equivtest.programs.examples.gated:two_blocks",
    f"{PARALLELIZE}_along_each_axis",
    x_shapes=((2, 2), (3, 2)),
    axes=("rows", "columns"),
    world_sizes=(4,),
    conclusive_dtypes=("float32", "float64", "float16"),  # its sums need more digits than bfloat16 has
)

SEQUENCE_PARALLEL = "equivtest.programs.examples.plans:sequence_parallel"

# Tokens that are sharded evenly, unevenly, or with empty shards.
sequence_parallel_block = module_property(
    BUILD,
    SEQUENCE_PARALLEL,
    x_shapes=((1, 2), (2, 2), (3, 2), (4, 2), (5, 2), (2, 3, 2)),
    examples=[ModuleCase(world_size=4, build=BUILD, parallelize=SEQUENCE_PARALLEL, x_shape=(5, 2), largest=3)],
)

# Two inputs, one by keyword, and two outputs: each output may be divided.  The worlds are divisors of the rows.
prepared_pair = module_property(
    "equivtest.programs.examples.gated:scaled_pair",
    "equivtest.programs.examples.plans:prepared_pair",
    inputs={"x": real(("rows", 2)), "memory": real(("rows", 2))},
    sizes={"rows": (12, 24)},
    positional=("x",),
    batch="whole",
    options=dict.fromkeys(("shards_x", "shards_memory", "in_one", "gathers_late"), (True, False)),
    world_sizes=(1, 2, 3, 4, 6, 12),
)

# Methods that run on each rank's rows, a rule for a new operator, and plain tensors beside DTensors.
rows_by_local_functions = module_property(
    "equivtest.programs.examples.by_local_functions:weighted",
    "equivtest.programs.examples.by_local_functions:by_rows",
    options={"partitions": (False, True)},
    inputs={"x": real(("rows", 2))},
    sizes={"rows": (12, 24)},
    positional=("x",),
    batch="whole",
    world_sizes=(1, 2, 3, 4, 6, 12),
)

ATTENTION = "equivtest.programs.examples.attention:attention_block"
HEADS_DIVIDED = "equivtest.programs.examples.attention_plan:heads_divided"

# Norms and softmaxes round, so that this one is judged on real numbers, within a bound.
attention_block = module_property(
    ATTENTION,
    HEADS_DIVIDED,
    x_shapes=((1, 6), (2, 6), (3, 6), (2, 2, 6)),
    examples=[
        ModuleCase(
            world_size=4,
            dtype="float64",
            build=ATTENTION,
            parallelize=HEADS_DIVIDED,
            x_shape=(2, 3, 6),
            values=(("real", 0),),
        )
    ],
    conclusive_dtypes=("float64",),
)

# The tokens of each row are divided. Also here real numbers, within a bound.
attention_block_by_tokens = module_property(
    ATTENTION,
    "equivtest.programs.examples.context:tokens_divided",
    x_shapes=[(2, 24, 6)],
    options={"kind": ("context", "in order", "documents", "blocks"), "rotates": ("allgather", "alltoall")},
    world_sizes=(2, 3),
    conclusive_dtypes=("float64",),
)

DECODER = "equivtest.programs.examples.decoder:decoder"

# Too deep for a bound of the whole, and so judged layer by layer and part by part, in every dtype.
decoder = module_property(
    DECODER,
    "equivtest.programs.examples.decoder_plan:heads_and_hidden_divided",
    x_shapes=((1, 2, 24), (2, 2, 24), (1, 3, 24)),
    by_parts=True,
    world_sizes=(1, 2, 3, 4, 6, 12),  # the divisors of its twelve heads
)

DATA_PARALLEL = "equivtest.programs.examples.plans:data_parallel"
FULLY_SHARDED = "equivtest.programs.examples.plans:fully_sharded"
BUFFERED = "equivtest.programs.examples.gated:buffered_block"

# Under data parallelism each rank has its own rows, equally many or not; no option is needed.
# Also six and eight ranks: with (15, 2), one of eight ranks has fewer rows than the others.
ROWS = ((2, 2), (3, 2), (4, 2), (5, 2), (7, 2), (4, 3, 2), (6, 2), (8, 2), (15, 2))

data_parallel_block = module_property(
    BUFFERED,
    DATA_PARALLEL,
    x_shapes=ROWS,
    examples=[
        ModuleCase(world_size=3, build=BUFFERED, parallelize=DATA_PARALLEL, x_shape=(5, 2), batch="mean of parts")
    ],
)

OWN_COPIES = "equivtest.programs.examples.own_copies:data_parallel_by_own_copies"

# Tensors that are not broadcast, and a gradient that is reduced late, which torch can do in float32 only (finding 147).
data_parallel_block_by_own_copies = module_property(
    BUFFERED,
    OWN_COPIES,
    x_shapes=ROWS,
    batch="mean of parts",
    options={
        "keeps": ("", "later buffers", "buffers", "all", "ignored", "gradients"),
        "by_mesh": (False, True),
        "buckets": ("one", "each", "first"),
    },
    examples=[
        ModuleCase(
            world_size=ranks,
            members=members,
            build=BUFFERED,
            parallelize=f"{OWN_COPIES}(keeps='gradients', by_mesh={by_mesh}, buckets='one')",
            x_shape=(4, 2),
            batch="mean of parts",
        )
        for ranks, members, by_mesh in ((2, (1, 2), True), (2, (), False), (4, (), False))
    ],
)

TWO_OUTPUTS = "equivtest.programs.examples.gated:two_output_block"

AVERAGED = "equivtest.programs.examples.averaged:"

# The average of the parameters becomes the parameters after the third of four updates, whose rates follow schedules.
# Autocast casts anew in each step what the unsharded module casts itself.
averaged_block = module_property(
    f"{AVERAGED}averaged_block",
    f"{AVERAGED}replicated",
    x_shapes=[(12, 2)],
    options={
        "average": ("mean", "exponential", "exponential of lists"),
        "casts": (False, True),
    },
    batch="mean of parts",
    optimizer=f"{AVERAGED}averaged",
    steps=4,
    world_sizes=(2, 3),
    examples=[
        ModuleCase(
            world_size=2,
            build=f"{AVERAGED}averaged_block(average={average!r}, casts=True)",
            parallelize=f"{AVERAGED}replicated",
            x_shape=(12, 2),
            batch="mean of parts",
            optimizer=f"{AVERAGED}averaged",
            steps=4,
            values=(("real", 0),),
        )
        for average in ("mean", "exponential", "exponential of lists")
    ],
)

# A communication hook of torch for each dtype; each is the mean of the gradients, under any setting.  In each dtype
# also two ranks of a world of three: the mean is over the group, not over the world.
data_parallel_block_by_hook = module_property(
    TWO_OUTPUTS,
    f"{DATA_PARALLEL}_by_hook",
    x_shapes=ROWS,
    batch="mean of parts",
    options={
        "hook": ("", "local_sgd", "before_local_sgd", "local_steps", "wrapped", "builtin"),
        **dict.fromkeys(("gradient_as_bucket_view", "static_graph", "find_unused_parameters"), (False, True)),
    },
    examples=[
        ModuleCase(
            world_size=2,
            dtype=dtype,
            members=(1, 2),
            build=TWO_OUTPUTS,
            parallelize=f"{DATA_PARALLEL}_by_hook",
            x_shape=(4, 2),
            batch="mean of parts",
        )
        for dtype in limits.DTYPES
    ]
    + [
        ModuleCase(
            world_size=2,
            dtype=dtype,
            build=TWO_OUTPUTS,
            parallelize=f"{DATA_PARALLEL}_by_hook(hook={hook!r}, gradient_as_bucket_view=False, static_graph=False, "
            "find_unused_parameters=False)",
            x_shape=(4, 2),
            batch="mean of parts",
            values=((mode, 0),),
        )
        # float16 rounds gradients of real values. Only float64 has PowerSGD, which batches matrices if wrapped.
        for hook, dtype, mode in (("builtin", "float32", "real"), ("wrapped", "float64", "dense"))
    ]
    + [
        ModuleCase(
            world_size=ranks,
            dtype="float64",
            build=TWO_OUTPUTS,
            parallelize=f"{DATA_PARALLEL}_by_hook(hook={hook!r})",
            x_shape=(num_rows, 2),
            batch="mean of parts",
        )
        for ranks in (2, 4)
        # With 15 rows each gradient has rank 2 or is zero. Otherwise PowerSGD of rank 2 is wrong (finding 163).
        for hook, num_rows in (("forgets", 4), ("barely", 4), ("of rank 2", 15))
    ],
)

# The same hooks under the function `replicate`, which may leave out a layer.
composable_data_parallel_block = module_property(
    TWO_OUTPUTS,
    f"{DATA_PARALLEL}_by_hook",
    x_shapes=ROWS,
    batch="mean of parts",
    options={
        "composable": (True,),
        "hook": ("", "local_sgd", "before_local_sgd", "local_steps"),
        **dict.fromkeys(("ignores", "gradient_as_bucket_view", "static_graph"), (False, True)),
    },
    examples=[
        ModuleCase(
            world_size=2,
            members=(1, 2),
            build=TWO_OUTPUTS,
            parallelize=f"{DATA_PARALLEL}_by_hook(composable=True, hook='', ignores={ignores}, "
            "gradient_as_bucket_view=False, static_graph=False)",
            x_shape=(4, 2),
            batch="mean of parts",
        )
        for ignores in (False, True)
    ],
)

# DistributedDataParallel looks for the parameter that takes part in no output, in outputs of each form.
data_parallel_block_of_outputs = module_property(
    "equivtest.programs.examples.gated:formed_block",
    f"{DATA_PARALLEL}_of_outputs",
    x_shapes=ROWS,
    batch="mean of parts",
    options={
        "form": ("tuple", "dict", "dataclass", "nested"),
        **dict.fromkeys(
            ("static_graph", "batched_grad_copy", "skip_all_reduce_unused_params"),
            (False, True),
        ),
    },
)

fully_sharded_block = module_property(
    BUILD,
    FULLY_SHARDED,
    x_shapes=ROWS,
    examples=[ModuleCase(world_size=4, build=BUILD, parallelize=FULLY_SHARDED, x_shape=(7, 2), batch="mean of parts")],
)

fully_sharded_block_by_layers = module_property(
    "equivtest.programs.examples.gated:repeated_block",
    f"{FULLY_SHARDED}_by_layers",
    x_shapes=ROWS,
    batch="mean of parts",
    options={"reshard_after_forward": (True, False, 2), "sets_root": (False, True)},
)

FLAT = "equivtest.programs.examples.flat:"
STRATEGIES = {"strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), "by_name": (True, False)}

# One flat parameter, or one for each layer, that is divided without regard to rows. No setting changes a result.
flat_sharded_block = module_property(
    f"{FLAT}partly_frozen_block",
    f"{FLAT}flat_sharded",
    x_shapes=ROWS,
    batch="mean of parts",
    options={
        **STRATEGIES,
        "setting": (
            *("", "in one", "early", "late", "cast", "hybrid"),
            *("ignored layer", "ignored weight", "rewritten", "hook"),
        ),
    },
    world_sizes=(3, 4),
)

fully_sharded_block_by_switches = module_property(
    "equivtest.programs.examples.switches:by_method",
    "equivtest.programs.examples.switches:fully_sharded_by_switches",
    x_shapes=ROWS,
    batch="mean of parts",
    options={
        "ignores": ("", "up", "down"),
        **dict.fromkeys(("together", "offloads", "prefetches", "gathers_early"), (False, True)),
    },
)

ADJUSTED = "equivtest.programs.examples.adjusted:"

fully_sharded_block_by_calls = module_property(
    "equivtest.programs.examples.gated:deep_block",
    f"{ADJUSTED}fully_sharded_by_calls",
    x_shapes=ROWS,
    batch="mean of parts",
    options={
        "collectives": ("default", "allocated", "own"),
        "parameters": ("default", "restored", "in two", "in groups"),
        "from_the_end": (False, True),
    },
    conclusive_dtypes=("float32", "float64", "float16"),  # too many digits for bfloat16
)

# Ranks with an even number of rows do not run a layer.
fully_sharded_block_with_unused_layer = module_property(
    f"{ADJUSTED}sometimes_gated",
    f"{ADJUSTED}fully_sharded_with_unused_layer",
    x_shapes=ROWS,
    batch="mean of parts",
    options={"together": (False, True), "num_buffers": (1, 2)},
)

fully_sharded_blocks_in_one_context = module_property(
    "equivtest.programs.examples.gated:two_blocks",
    f"{ADJUSTED}fully_sharded_in_one_context",
    x_shapes=((2, 2), (4, 2), (5, 2)),
    conclusive_dtypes=("float32", "float64", "float16"),  # too many digits for bfloat16
)

NARROW = "equivtest.programs.examples.narrow:narrow_block"
WITH_CASTS = "equivtest.programs.examples.narrow_plan:fully_sharded_with_casts"

# FSDP2, or each layer itself, casts what the layer takes, and the backward may recompute the layers. Small integers
# have few bits, so two examples have real values, and the residual keeps more of their bits than the layers.
fully_sharded_block_with_casts = module_property(
    NARROW,
    WITH_CASTS,
    x_shapes=((4, 2), (5, 2), (4, 3, 2)),
    batch="mean of parts",
    options={
        **dict.fromkeys(("widens", "casts_in_layers", "replicas"), (False, True)),
        "recomputes": ("", "composable", "reentrant", "selective", "sharded"),
    },
    examples=[
        ModuleCase(
            world_size=2,
            dtype=dtype,
            build=f"{NARROW}(widens={casts})",
            parallelize=f"{WITH_CASTS}(casts_in_layers={casts}, recomputes='composable')",
            x_shape=(2, 2),
            batch="mean of parts",
            values=(("real", 0),),
        )
        for dtype, casts in (("float32", False), ("float64", True))
    ],
    conclusive_dtypes=("float32", "float64"),
)

fully_sharded_block_from_rank_0 = module_property(
    "equivtest.programs.examples.gated:signed_block",
    f"{FULLY_SHARDED}_from_rank_0",
    x_shapes=((2, 2), (3, 2), (5, 2), (4, 3, 2)),
    batch="mean of parts",
    options={"meta": (True, False)},
    needs_world=True,
)

WHOLE_MESH = "equivtest.programs.examples.whole_mesh:"
DATA = ("shards", "replicas", "both")


def on_two_axes(parallelize: str, mesh: tuple[int, int] = (2, 2)) -> ModuleCase:
    """Returns a case on four ranks and a mesh of two axes."""
    return ModuleCase(
        world_size=4,
        mesh=mesh,
        axes=("dp", "tp"),
        build="equivtest.programs.examples.gated:scaled_block",
        parallelize=f"{WHOLE_MESH}{parallelize}",
        x_shape=(4, 2, 2),
        batch="mean of parts",
    )


# The gradients of the scale, as of a norm's weight, are partial along 'tp' when FSDP2 reduces them along 'dp'.
fully_sharded_sequence_parallel_block = module_property(
    "equivtest.programs.examples.gated:scaled_block",
    f"{WHOLE_MESH}sequence_and_data_parallel",
    x_shapes=((4, 2, 2), (4, 3, 2), (7, 2, 2)),
    axes=("dp", "tp"),
    batch="mean of parts",
    options={"data": (*DATA, "groups", "unflattened", "flattened"), "separates": (False, True)},
    examples=[on_two_axes("sequence_and_data_parallel(data='shards', separates=True)")],
    conclusive_dtypes=("float32", "float64"),  # too many digits for 16 bits
)

# All ranks along 'dp' have the same number of rows.
fully_sharded_block_on_named_axes = module_property(
    "equivtest.programs.examples.gated:scaled_block",
    f"{WHOLE_MESH}parallel_on_named_axes",
    x_shapes=((4, 2, 2), (4, 3, 2)),
    axes=("dp", "tp"),
    world_sizes=(2, 4),
    batch="mean of parts",
    options={"data": DATA},
    examples=[
        on_two_axes("parallel_on_named_axes(data='shards')"),
        on_two_axes("parallel_on_named_axes(data='shards on two')", mesh=(4, 1)),
    ],
    conclusive_dtypes=("float32", "float64"),
)

replicated_block_by_layers = module_property(
    BUFFERED,
    f"{WHOLE_MESH}replicated_by_layers",
    x_shapes=((2, 2), (5, 2), (4, 3, 2)),
    batch="mean of parts",
    options={"ignores": ("", "up", "down")},
)

EVEN = "equivtest.programs.examples.gated:even_block"
FROM_STATE = "equivtest.programs.examples.plans:sharded_sequence_parallel_from_state"

# The same after the state of another copy is loaded, which was evaluated in bfloat16.  bfloat16 rounds real numbers.
fully_sharded_sequence_parallel_block_from_state = module_property(
    EVEN,
    FROM_STATE,
    x_shapes=((4, 2, 2), (4, 3, 2)),
    axes=("dp", "tp"),
    world_sizes=(2, 4),
    batch="mean of parts",
    options={"whole": (True, False)},
    conclusive_dtypes=("float32", "float64"),
    examples=[
        ModuleCase(
            world_size=4,
            mesh=(2, 2),
            axes=("dp", "tp"),
            build=EVEN,
            parallelize=f"{FROM_STATE}(whole=True)",
            x_shape=(4, 3, 2),
            batch="mean of parts",
            values=(("real", 0),),
        )
    ],
)

TOKEN_MEAN = "equivtest.programs.examples.token_mean:"

# A whole step: its loss is the mean over all tokens, which ranks and micro-batches divide unevenly.  Before
# it, most parameters are frozen for one forward and backward.
token_mean_step = module_property(
    "equivtest.programs.examples.next_token:next_token",
    f"{FULLY_SHARDED}_by_layers",
    inputs={"ids": ids(7, ("batch", "seq")), "targets": targets(7, ("batch", "seq"))},
    batch="parts of the whole",
    sizes={"batch": (2, 3, 4, 5, 6, 7, 8), "seq": (2,)},
    options={"reshard_after_forward": (True, False)},
    optimizer=f"{TOKEN_MEAN}adamw",
    step="equivtest.programs.examples.thawed:thawed",
    micro_batches=2,
    max_norm=0.5,
    conclusive_dtypes=("float32", "float64"),
)

# The parameters and the state of the optimizer are loaded again before the second step. Each layer is sharded.
resumed_step = module_property(
    "equivtest.programs.examples.resumed:resumable_next_token",
    "equivtest.programs.examples.resumed:resumable",
    inputs={"ids": ids(7, ("batch", "seq")), "targets": targets(7, ("batch", "seq"))},
    batch="parts of the whole",
    sizes={"batch": (2, 4, 5), "seq": (2,)},
    options={
        "state": ("shards", "whole", "rank 0", "flat", "trained", "files"),
        "together": (False, True),
        "optimizers": ("SGD", "AdamW", "both"),
    },
    optimizer="equivtest.programs.examples.resumed:Resumable",
    step="equivtest.programs.examples.resumed:resumed",
    world_sizes=(2, 3),
    max_norm=0.5,
    conclusive_dtypes=("float32", "float64"),
)

# All micro-batches except the last run in `no_sync`. Buffers of all ranks except the first change between the steps.
unsynchronized_step = module_property(
    "equivtest.programs.examples.next_token:scaled_next_token",
    DATA_PARALLEL,
    inputs={"ids": ids(7, ("batch", "seq")), "targets": targets(7, ("batch", "seq"))},
    batch="parts of the whole",
    sizes={"batch": (2, 4, 7, 9, 12), "seq": (2,)},
    optimizer=f"{TOKEN_MEAN}adamw",
    step="equivtest.programs.examples.unsynchronized:unsynchronized",
    micro_batches=3,
    max_norm=0.5,
    conclusive_dtypes=("float32", "float64"),
)

# Flat parameters, also in `no_sync`. Their module clips them. States and whole gradients are read and written.
FLAT_STEP: dict[str, Any] = {
    "inputs": {"ids": ids(7, ("batch", "seq")), "targets": targets(7, ("batch", "seq"))},
    "sizes": {"batch": (2, 4, 7, 9, 12), "seq": (2,)},
    "batch": "parts of the whole",
    "optimizer": f"{TOKEN_MEAN}adamw",
    "micro_batches": 3,
    "max_norm": 0.5,
    "world_sizes": (2, 4),
    "conclusive_dtypes": ("float32", "float64"),
}

flat_sharded_step = module_property(
    "equivtest.programs.examples.next_token:next_token",
    f"{FLAT}flat_sharded",
    **FLAT_STEP,
    options={**STRATEGIES, "setting": ("ignored head", "full state", "sharded state", "local state")},
    step=f"{FLAT}flat_token_mean",
    examples=[
        ModuleCase(
            world_size=2,
            build="equivtest.programs.examples.next_token:next_token(ties=True)",
            parallelize=f"{FLAT}flat_sharded(strategy='FULL_SHARD', by_name=True, setting='full state')",
            inputs=(("ids", "ids(7)", ("batch", "seq")), ("targets", "targets(7, -100)", ("batch", "seq"))),
            sizes=(("batch", 7), ("seq", 2)),
            batch="parts of the whole",
            optimizer=f"{TOKEN_MEAN}adamw",
            step=f"{FLAT}flat_token_mean",
            steps=2,
            micro_batches=3,
            max_norm=0.5,
            values=(("real", 0),),
        )
    ],
)

flat_sharded_step_by_largest = module_property(
    "equivtest.programs.examples.next_token:next_token",
    f"{FLAT}flat_sharded",
    **FLAT_STEP,
    options={"strategy": ("FULL_SHARD", "NO_SHARD"), "by_name": (True,), "setting": ("ignored head", "")},
    step=f"{FLAT}flat_token_mean_by_largest",
    norm_type=math.inf,
)

# Each row is a micro-batch, and in most cases ranks have different numbers of rows. Buffers change too.
joined_step = module_property(
    "equivtest.programs.examples.next_token:scaled_next_token",
    "equivtest.programs.examples.joined:replicated",
    inputs={"ids": ids(7, ("batch", "seq")), "targets": targets(7, ("batch", "seq"))},
    batch="parts of the whole",
    sizes={"batch": (3, 4, 5, 7, 11, 15), "seq": (2,)},
    options={"ends": ("", "early", "off")},
    optimizer=f"{TOKEN_MEAN}adamw",
    step="equivtest.programs.examples.joined:joined",
    conclusive_dtypes=("float32", "float64"),
)
