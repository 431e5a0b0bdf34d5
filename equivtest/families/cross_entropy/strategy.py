"""Draws cases of one cross entropy over sharded classes, within the contract and outside of it."""

from __future__ import annotations

from typing import Any

from equivtest.cases.case import Shape, fields_of
from equivtest.cases.picks import (
    Cases,
    Draw,
    edge_sizes,
    free,
    is_several,
    pick,
    pick_gradients,
    pick_run,
    pick_values,
    residues,
)
from equivtest.families.cross_entropy.case import MISFITS, REDUCTIONS, CrossEntropyCase, RefusedCrossEntropyCase
from equivtest.families.cross_entropy.gathered.case import (
    GATHERED_MISFITS,
    GatheredCrossEntropyCase,
    RefusedGatheredCrossEntropyCase,
)
from equivtest.property import Space

CROSS_ENTROPY_MODES = (("real",), ("peaked",), *[("real", "peaked", "real", "peaked")] * 16)
NUM_POSITION_DIMS = (1, 0, 1, 1, 1, 2, 2, 3, 3, 4)
BATCHES = (1, 2, 3, 5, 7, 16)
SMALL = (1, 2, 3)
IGNORED_TABLE = ("none", "none", "some", "some", "none", "all")
IGNORE_INDICES = (-100, -100, -1, 0, 1, 4096)


@Cases
def gathered_cross_entropy_cases(draw: Draw, space: Space) -> GatheredCrossEntropyCase:
    """Draws cases without loss_parallel. Shrinks to one real draw, one position, one class, no reduction, no smoothing.

    In 16 bits only few positions are reduced, because torch adds the losses in 16 bits, and the bound for many
    positions is too wide. Cases with smoothing and a reduction have real values, because peaked rows add up to more
    than float16 can represent.
    """
    case = CrossEntropyCase(**_pick_fields(draw, space))
    shares, positions = pick(draw, "shares", ("classes", "classes", "positions")), case.positions
    shares = shares if positions else "classes"
    if case.dtype in ("bfloat16", "float16") and case.reduction != "none":
        positions = tuple(min(size, 5) if dim == 0 else 1 for dim, size in enumerate(positions))
    if shares == "positions" and case.reduction == "mean":
        positions = (-(-positions[0] // case.world_size) * case.world_size, *positions[1:])
    fields = {"positions": positions, "target_is_dtensor": True, "weight_is_dtensor": case.weighted}
    label_smoothing = pick(draw, "label_smoothing", (0.0, 0.0, 0.125, 0.1, 1.0), bool)
    if label_smoothing and case.dtype == "float16" and case.reduction != "none":
        fields["values"] = tuple(("real", seed) for _, seed in case.values)
    return GatheredCrossEntropyCase(
        **fields_of(case) | fields | {"records": case.records and shares == "classes"},
        shares=shares,
        label_smoothing=label_smoothing,
    )


@Cases
def refused_gathered_cross_entropy_cases(draw: Draw, space: Space) -> RefusedGatheredCrossEntropyCase:
    fields, misfit = _pick_loss(draw, space), pick(draw, "misfit", GATHERED_MISFITS)
    if misfit == "batch_mean" and fields["world_size"] == 1:
        misfit = "above"  # one rank has no uneven shards
    if misfit == "batch_mean":
        fields |= {"reduction": "mean", "positions": (fields["world_size"] + 1, *fields["positions"][1:])}
    if misfit == "plain_target":
        fields["positions"] = (max((2, *fields["positions"][:1])), *fields["positions"][1:])
    if misfit == "plain_weight":
        fields |= {"weighted": True, "num_classes": max(2, fields["num_classes"])}
    return RefusedGatheredCrossEntropyCase(
        misfit=misfit,
        **fields,
        shares="positions" if misfit == "batch_mean" else "classes",
        target_is_dtensor=misfit != "plain_target",
        weight_is_dtensor=fields["weighted"] and misfit != "plain_weight",
        label_smoothing=pick(draw, "label_smoothing", (0.0, 0.125)),
        values=pick_values(draw, (("real",),)),
    )


@Cases
def cross_entropy_cases(draw: Draw, space: Space) -> CrossEntropyCase:
    """Draws cases under loss_parallel. Shrinks to one draw of real values, one position, one class, no reduction."""
    fields = _pick_fields(draw, space)
    row_ranks = pick(draw, "row_ranks", _row_ranks(fields["world_size"]))
    if row_ranks > 1 and fields["positions"]:
        reduction = "sum" if fields["reduction"] == "mean" else fields["reduction"]
        fields |= {"row_ranks": row_ranks, "reduction": reduction, "target_is_dtensor": True}
        fields |= {"records": False, "members": ()}
    return CrossEntropyCase(**fields)


@Cases
def refused_cross_entropy_cases(draw: Draw, space: Space) -> RefusedCrossEntropyCase:
    """Draws cases in which every rank has a class, because a rank without a class first raises a different error."""
    fields = _pick_loss(draw, space)
    fields["num_classes"] = fields["world_size"] * pick(draw, "classes per rank", SMALL, free)
    misfit = pick(draw, "misfit", MISFITS)
    if misfit == "probabilities":
        fields["num_classes"] = max(2, fields["num_classes"])
    return RefusedCrossEntropyCase(misfit=misfit, **fields, values=pick_values(draw, (("real",),)))


def _row_ranks(world_size: int) -> tuple[int, ...]:
    """Returns a table of numbers of ranks that divide positions. Most entries are 1, for a mesh of one axis."""
    return (1,) * 3 + tuple(size for size in range(2, world_size + 1) if world_size % size == 0)


def _pick_fields(draw: Draw, space: Space) -> dict[str, Any]:
    """Draws the fields of a case on a mesh of one axis."""
    fields = _pick_loss(draw, space)
    return {
        **fields,
        "ignore_index": pick(draw, "ignore_index", IGNORE_INDICES, free),
        "ignored": pick(draw, "ignored", IGNORED_TABLE),
        "target_is_dtensor": pick(draw, "target_is_dtensor", (False, True)),
        "weight_is_dtensor": pick(draw, "weight_is_dtensor", (False, True)) and fields["weighted"],
        **pick_gradients(draw, ("x",)),
        **pick_run(draw, fields["world_size"], CROSS_ENTROPY_MODES),
    }


def _pick_loss(draw: Draw, space: Space) -> dict[str, Any]:
    world_size = pick(draw, "world_size", space.world_sizes)
    return {
        "world_size": world_size,
        "dtype": pick(draw, "dtype", space.dtypes),
        "positions": _pick_positions(draw),
        "num_classes": pick(draw, "num_classes", edge_sizes(world_size), residues(world_size)),
        "reduction": pick(draw, "reduction", REDUCTIONS),
        "weighted": pick(draw, "weighted", (False, True)),
    }


def _pick_positions(draw: Draw) -> Shape:
    num_dims = pick(draw, "position dims", NUM_POSITION_DIMS)
    batch = pick(draw, "batch", BATCHES, is_several)
    others = [pick(draw, f"position dim {dim}", SMALL, free) for dim in range(1, 4)]
    if num_dims == 0:
        return ()
    return (batch if num_dims < 3 else min(batch, 3), *others[: num_dims - 1])
