"""Predicates on cases of redistribution, for the conditions `where` in known_failures.toml."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivtest.layout import Layout, Partial, Replicate, Shard, local_box, shard_bounds

if TYPE_CHECKING:
    from equivtest.families.redistribute.case import RedistributeCase
    from equivtest.families.redistribute.case_refused import RefusedRedistributeCase


def ranks_on_first_axis(case: RefusedRedistributeCase) -> int:
    return case.mesh_shape[0]


def divides_on_every_axis(case: RefusedRedistributeCase) -> bool:
    """True if the tensor is sharded along each mesh axis. torch 2.14 and later treat such a tensor as partial sums."""
    return all(text.startswith("shard") for text in case.source)


def mixes_reductions(case: RedistributeCase) -> bool:
    """True if source and cotangent are partial with different reductions on one axis of several ranks."""
    pairs = zip(case.operand_layout("x").placements, case.cotangent_layout.placements, case.mesh_shape, strict=True)
    return any(
        isinstance(old, Partial) and isinstance(new, Partial) and old != new and num_ranks > 1
        for old, new, num_ranks in pairs
    )


def gathers_nested_shards_flat(case: RedistributeCase) -> bool:
    """True if torch gathers x in one step, although its nested shards differ from the shards of one axis of all ranks.

    Shards are nested if two mesh axes shard the same dim.
    """
    return _is_gathered_flat(case, case.operand_layout("x"), case.tensors["output"].layout)


def gradient_gathers_nested_shards_flat(case: RedistributeCase) -> bool:
    """Like `gathers_nested_shards_flat`, for the cotangent."""
    return _is_gathered_flat(case, case.cotangent_layout, case.gradient_layout)


def _is_gathered_flat(case: RedistributeCase, source: Layout, target: Layout) -> bool:
    """True if two axes shard a dim, and torch gathers the dim in one step although the shards do not fit this step.

    The step assumes the shards of one axis of all ranks. The second axis may shard the dim again afterwards.
    """
    first, second = source.placements[0], source.placements[-1]
    if not case.flattened or not isinstance(first, Shard) or first != second:
        return False
    if target.placements not in ((Replicate(), Replicate()), (Replicate(), first)):
        return False
    ranks = range(case.world_size)
    nested = [local_box(case.shape, source, case.mesh_shape, rank)[first.dim] for rank in ranks]
    return nested != [shard_bounds(case.shape[first.dim], case.world_size, rank) for rank in ranks]
