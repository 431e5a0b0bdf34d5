"""Draws cases of a perceptron under data parallelism on a mesh of two axes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from equivtest.cases.case import Shape
from equivtest.cases.picks import Cases, Draw, kind_of_mesh, pick
from equivtest.families.training.data_parallel.strategy import TIES_DRAWN, _pick_data_parallel
from equivtest.families.training.two_axes.case import DIVISIONS, TwoAxisCase
from equivtest.property import Space

USE_LOCAL_OUTPUT = (True, False, False)
RECORDS_WITHOUT_CLIPPING = (False,) * 3 + (True,)
"""Values of `records` before clipping is considered: one case in seven records in the end.

No collectives of clipping are documented, and nearly half of the cases clip.
"""


@Cases
def two_axis_cases(draw: Draw, space: Space, *, style: str) -> TwoAxisCase:
    """Draws cases, three in four of which train. In every case some parameter needs a gradient.

    The hidden activation is a plain tensor only if its shards are even, because torch assumes even shards of plain
    tensors. Shrinks to one forward and backward of one row.
    """
    is_replicated = style == "ddp_tp"
    fields = _pick_data_parallel(
        draw, space, "ddp" if is_replicated else "fsdp2", "", TIES_DRAWN if style == "hsdp" else ("",)
    )
    mesh = pick(draw, "mesh", two_axis_meshes(fields["world_size"], style), kind_of_mesh)
    use_local_output = pick(draw, "use_local_output", USE_LOCAL_OUTPUT)
    is_even = style == "hsdp" or fields["hidden_features"] % mesh[1] == 0
    if style == "fsdp2_tp":
        fields["by_columns"] = ()
    if is_replicated:
        fields |= {"wrapper": "mesh", "clip_norm": 0.0, "norm_type": "2"}
    own = {"style": style, "members": (), "mesh": mesh, "use_local_output": is_even and use_local_output}
    own["records"] = pick(draw, "records on two axes", (False,) if is_replicated else RECORDS_WITHOUT_CLIPPING)
    own["records"] = own["records"] and not fields.get("clip_norm")
    own |= _reduction(draw, fields, mesh[1]) if style == "hsdp" else {}
    return TwoAxisCase(**fields | own)


def _reduction(draw: Draw, fields: Mapping[str, Any], num_shards: int) -> dict[str, Any]:
    """Draws how HSDP reduces gradients. A rank without other shards divides twice by a factor of float16 or float64.

    See finding 75.
    """
    scatters, division = pick(draw, "scatters_every", (False, True)), pick(draw, "division", DIVISIONS)
    is_refused = division == "factor" and num_shards == 1 and fields["dtype"] in ("float16", "float64")
    return {
        "scatters_every": scatters,
        "syncs_every": fields["syncs_every"] and not scatters,
        "micro_batches": max(fields["micro_batches"], 1 + scatters),
        "division": "" if is_refused else division,
    }


@cache
def two_axis_meshes(world_size: int, style: str) -> tuple[Shape, ...]:
    """Returns a table of meshes. Those with several ranks on both axes occur most often.

    For hsdp and ddp_tp, meshes with one rank on the second axis occur less often, because they shard nothing.
    """
    pairs = [(size, world_size // size) for size in range(1, world_size + 1) if world_size % size == 0]
    dividing = [pair for pair in pairs if pair[1] > 1] * (0 if style == "fsdp2_tp" else 4)
    return (*pairs, *dividing, *[pair for pair in pairs if 1 not in pair] * 4)
