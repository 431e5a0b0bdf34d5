"""Cases of one reduction or softmax."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from equivtest.cases.case import Shape
from equivtest.cases.picks import (
    LARGE_DIMS,
    POISON_TABLE,
    RECORDS,
    REPEATS,
    SMALL_SIZES,
    edge_sizes,
    pick,
    pick_gradients,
    pick_members,
    pick_values,
)
from equivtest.families.reduction.case import OPS, SOFTMAXES, ReductionCase
from equivtest.property import Space

REDUCTION_MODES = (("dense",), ("real",), *[("dense", "real", "dense", "real")] * 16)
NUM_DIMS = (1, 1, 2, 2, 2, 3)
PLACES = ("replicate", *["shard"] * 14, "partial(sum)")


@st.composite
def reduction_cases(draw: DrawFn, space: Space) -> ReductionCase:
    """Cases of one reduction or softmax on one mesh axis.

    Shrinks to the dense sum of one element that every rank has.
    """
    world_size = pick(draw, "world_size", space.world_sizes)
    op = pick(draw, "op", OPS)
    shape, large_dim = _pick_shape(draw, world_size)
    place = pick(draw, "place", PLACES)
    shard_dim = large_dim if pick(draw, "shards the large dim", (*[True] * 15, False)) else 0
    layout = f"shard({shard_dim})" if place == "shard" else place
    any_dim = pick(draw, "first dim", LARGE_DIMS) % len(shape)
    first = large_dim if pick(draw, "reduces the large dim", (True, True, False)) else any_dim
    others = [pick(draw, f"dim {dim} too", (False, False, True)) for dim in range(4)]
    dims = {first} if op in SOFTMAXES else {first} | {dim for dim in range(len(shape)) if others[dim]}
    keepdim = pick(draw, "keepdim", (False, True))
    values = pick_values(draw, REDUCTION_MODES)
    return ReductionCase(
        world_size=world_size,
        dtype=pick(draw, "dtype", space.dtypes),
        op=op,
        shape=shape,
        layout=layout,
        dims=tuple(sorted(dims)),
        keepdim=keepdim and op not in SOFTMAXES,
        **pick_gradients(draw, ("x",)),
        values=tuple(("dense", seed) for _, seed in values) if layout == "partial(sum)" else values,
        poison=pick(draw, "poison", POISON_TABLE),
        repeats=pick(draw, "repeats", REPEATS),
        members=pick_members(draw, world_size),
        records=pick(draw, "records", RECORDS),
    )


def _pick_shape(draw: DrawFn, world_size: int) -> tuple[Shape, int]:
    num_dims = pick(draw, "dims", NUM_DIMS)
    large_dim = pick(draw, "large dim", LARGE_DIMS) % num_dims
    large = pick(draw, "large size", _sizes(world_size))
    small = [pick(draw, f"size {dim}", SMALL_SIZES) for dim in range(max(NUM_DIMS))]
    return tuple(large if dim == large_dim else small[dim] for dim in range(num_dims)), large_dim


@cache
def _sizes(world_size: int) -> tuple[int, ...]:
    """Edge sizes, ascending, more than three in four of them such that the ranks' shards differ."""
    edges = edge_sizes(world_size)
    uneven = [size for size in edges if size % world_size]
    return tuple(sorted([*uneven, *uneven, *(set(edges) - set(uneven))]))
