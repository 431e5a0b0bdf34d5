"""Claims about steps of training: the norm of all gradients, a scaled loss, and what torch's wrappers may be told.

A failure here means that a step updates by other gradients than the unsharded module has: look first at what is added
up over which group, and how often.
"""

from __future__ import annotations

import math

from equivtest.families.module.subject.mixture import AXES, SIZES
from equivtest.families.module.subject.total_norm import MAX_NORM
from equivtest.module import module_property
from equivtest.property import Property

MIXTURE, NORM = "equivtest.families.module.subject.mixture:", "equivtest.families.module.subject.total_norm:"


def clipped(build: str, parallelize: str, step: str, norm_type: float) -> Property:
    """Steps on meshes of two axes, each of which asks torch for the norm in another way."""
    return module_property(
        f"{MIXTURE}{build}",
        f"{MIXTURE}{parallelize}",
        x_shapes=[(SIZES[build],)],
        batch="whole",
        axes=AXES,
        optimizer=f"{MIXTURE}sgd",
        step=f"{NORM}{step}",
        steps=3 if norm_type == 2 else 2,
        max_norm=MAX_NORM,
        norm_type=norm_type,
    )


# Parameters that all ranks hold, that are divided along one axis or both, frozen, unused, and empty on some ranks.
norm_of_one_mesh_by_root = clipped("with_empty_shards", "on_one_mesh", "in_one_call_by_root", 2)
norm_of_one_mesh_by_largest = clipped("mixture", "on_one_mesh", "in_one_call_by_largest", math.inf)

# The same on several meshes, beside experts of each rank's own and parameters of one pipeline stage.
norm_of_groups_by_root = clipped("grouped_with_empty_shards", "over_meshes", "by_groups_by_root", 2)
norm_of_groups_by_largest = clipped("grouped", "over_meshes", "by_groups_by_largest", math.inf)

# An infinity on one rank alone keeps every rank from its update.
scaled_step = clipped("divided_first", "on_one_mesh", "scaled", 2)
