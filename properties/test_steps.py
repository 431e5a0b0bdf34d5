"""Claims about steps of training: the norm of all gradients, a scaled loss, and what torch's wrappers may be told.

A failure here means that a step updates by other gradients than the unsharded module has: look first at what is added
up over which group, and how often.
"""

from __future__ import annotations

import math

from equivtest.families.module.case_mixture import AXES, MAX_NORM, SIZES
from equivtest.module import module_property, real
from equivtest.property import Property

FAMILY = "equivtest.families.module."
MIXTURE, TOLD, STEPS = f"{FAMILY}case_mixture:", f"{FAMILY}case_told:", f"{FAMILY}case_told_steps:"
SUBJECT = f"{FAMILY}subject."


def clipped(build: str, parallelize: str, step: str, norm_type: float) -> Property:
    """Steps on meshes of two axes, each of which asks torch for the norm in another way."""
    return module_property(
        f"{MIXTURE}{build}",
        f"{SUBJECT}mixture:{parallelize}",
        x_shapes=[(SIZES[build],)],
        axes=AXES,
        optimizer=f"{MIXTURE}sgd",
        step=f"{SUBJECT}total_norm:{step}",
        max_norm=MAX_NORM,
        norm_type=norm_type,
    )


# Parameters that all ranks hold, that are divided along one axis or both, frozen and unused.
norm_of_one_mesh_by_largest = clipped("mixture", "on_one_mesh", "in_one_call_by_largest", math.inf)

# The same on several meshes, empty on some ranks too, beside experts of each rank's own and parameters of one pipeline
# stage.  The other norm of each is among the right ones of `tests.step_defects`.
norm_of_groups_by_root = clipped("grouped_with_empty_shards", "over_meshes", "by_groups_by_root", 2)

# An infinity on one rank alone keeps every rank from its update.
scaled_step = clipped("divided_first", "on_one_mesh", "scaled", 2)

# FSDP2 told everything that its documentation names, a branch of the module for each.
fsdp2_told = module_property(f"{TOLD}branches", f"{SUBJECT}fsdp2_told:told", x_shapes=[(7, 2)], needs_world=True)


def told_in_steps(build: str, parallelize: str, step: str, *, axes: tuple[str, ...] = ()) -> Property:
    """Two steps of two micro-batches; between the steps the optimizer's state is handed to another one."""
    return module_property(
        f"{STEPS}{build}",
        f"{SUBJECT}told_steps:{parallelize}",
        inputs={"x": real(("batch", 2))},
        sizes={"batch": (8,)},  # three ranks have 3, 3 and 2 rows, each two micro-batches
        optimizer=f"{STEPS}momentum",
        step=f"{SUBJECT}told_steps:{step}",
        micro_batches=2,
        axes=axes,
    )


ddp_told = told_in_steps("replicated_branches", "replicated", "replicated_step")
fsdp2_told_in_steps = told_in_steps("sharded_branches", "sharded", "sharded_step")
hsdp_told_in_steps = told_in_steps("branches_both_ways", "both_ways", "sharded_step", axes=AXES)
