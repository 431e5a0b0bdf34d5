"""Claims about steps of training: the norm of all gradients, and a scaled loss.

A failure here means that a step updates by other gradients than the unsharded module's. Look first at which tensors are
summed over which group, and how often.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from equivtest.module import module_property
from equivtest.programs.examples.mixture import AXES, MAX_NORM, SIZES
from equivtest.property import Property

EXAMPLES = "equivtest.programs.examples."
MIXTURE = f"{EXAMPLES}mixture:"


FULL = (1, 2, 3, 4)
"""Numbers of ranks on which each rank has elements of a dim of size 7."""


def clipped(
    build: str,
    parallelize: str,
    step: str,
    norm_type: float,
    *,
    world_sizes: tuple[int, ...] = (),
    options: Mapping[str, Sequence[str]] | None = None,
) -> Property:
    """Returns a property of steps on meshes of two axes; `step` says how torch is asked for the norm."""
    return module_property(
        f"{MIXTURE}{build}",
        f"{EXAMPLES}mixture_plan:{parallelize}",
        x_shapes=[(SIZES[build],)],
        axes=AXES,
        options=options,
        optimizer=f"{MIXTURE}{'sgd_or_adam' if options else 'sgd'}",
        step=f"{EXAMPLES}total_norm:{step}",
        max_norm=MAX_NORM,
        norm_type=norm_type,
        world_sizes=world_sizes,
        conclusive_dtypes=("float32", "float64"),  # a step of 16 bits is inconclusive
    )


# Parameters that are replicated, sharded along one axis or both, frozen, and unused.  If a rank has an empty
# shard, torch hangs for the largest magnitude (finding 23).
norm_of_one_mesh_by_largest = clipped("mixture", "on_one_mesh", "in_one_call_by_largest", math.inf, world_sizes=FULL)

# The sum of all magnitudes. A gradient counts once, however many ranks have a replica. Some ranks have empty shards.
norm_of_one_mesh_by_sum = clipped("with_empty_shards", "on_one_mesh", "in_one_call_by_sum", 1, world_sizes=FULL)

# The 2-norm on several meshes, with shards empty on some ranks, beside each rank's own experts and parameters of one
# pipeline stage.  `studies.step_defects` judges the other norm of each.
norm_of_groups_by_root = clipped("grouped_with_empty_shards", "over_meshes", "by_groups_by_root", 2)

# An infinity on one rank alone, the last, keeps every rank from its update, and Adam from counting the step.
scaled_step = clipped(
    "divided_first", "on_one_mesh", "scaled", 2, world_sizes=FULL, options={"adam": ("", "foreach", "fused")}
)

# Each optimizer as a loop and by lists of tensors or a kernel, on DTensors and, on four ranks, their empty shards; the
# unsharded module is trained by the loop.  Updates in 16 bits are too small to be seen.
every_optimizer = module_property(
    f"{EXAMPLES}optimizers:many_trained",
    f"{EXAMPLES}plans:fully_sharded",
    x_shapes=[(5, 2)],
    options={"options": ("plain", "varied"), "fused": ("", "Adam", "AdamW")},
    optimizer=f"{EXAMPLES}optimizers:by_all",
    conclusive_dtypes=("float32", "float64"),
    batch="mean of parts",
    world_sizes=(2, 4),
)

# Each rank updates some of the four parameters, and sends them to the others.
zero_redundancy = module_property(
    f"{EXAMPLES}zero_redundancy:trained_block",
    f"{EXAMPLES}zero_redundancy:replicated",
    x_shapes=[(12, 2)],
    batch="mean of parts",
    options={"trains_by": ("AdamW", "SGD"), "packs": (False, True)},
    optimizer=f"{EXAMPLES}zero_redundancy:scheduled",
    steps=3,
    world_sizes=(2, 4),
)

# Each rank updates its own parameters, and after every fourth update the ranks average them.
local_sgd_block = module_property(
    f"{EXAMPLES}local_sgd:local_block",
    f"{EXAMPLES}plans:data_parallel",
    x_shapes=[(12, 2)],
    batch="mean of parts",
    options={"averager": ("periodic", "hierarchical")},
    optimizer=f"{EXAMPLES}local_sgd:local",
    world_sizes=(2, 4),
    needs_world=True,
)
