"""Draws cases of one redistribution, within the contract and outside of it."""

from __future__ import annotations

import itertools
import math
from functools import cache

from equivtest.cases.case import Shape
from equivtest.cases.picks import (
    POISON_TABLE,
    REFUSED_MODES,
    REPEATS,
    Cases,
    Draw,
    edge_sizes,
    free,
    kind_of_mesh,
    pick,
    pick_gradients,
    pick_members,
    pick_values,
    residues,
)
from equivtest.families.redistribute.case import RedistributeCase, fits_sums
from equivtest.families.redistribute.case_refused import MISFITS, RefusedRedistributeCase
from equivtest.layout import Partial, Shard, parse_placement
from equivtest.property import Enumeration, Space

NUM_DIMS = (*(1,) * 6, *(2,) * 14, *(3,) * 6, 4, 4, 0)
MAX_SIZES = {0: 1, 1: 33, 2: 17, 3: 9, 4: 5}
"""Number of dims -> largest size of a dim. Every dim may be sharded, and all sizes are near a multiple of the ranks."""

NO_ELEMENTS = (None,) * 20 + (0, 1)
"""Which dim gets size 0, modulo the number of dims; None: no dim."""

OPS = ("sum",) * 4 + ("avg", "max", "min")
ROADS_DRAWN = ("dtensor",) * 6 + ("local",) * 3 + ("distribute", "distribute", "full_tensor")
WHOLE = ("replicate",) * 2  # twice, because a table of one entry would be no draw
COTANGENTS = (False, False, True)
STAYS_PARTIAL = (False,) * 7 + (True,)
REDISTRIBUTE_MODES = (
    ("dense",), ("index",), ("special",), ("real",), *[("special", "dense", "real", "index", "special")] * 16,
)  # fmt: skip
"""Modes of the draws of one case.

Most cases have an odd number of draws, so that repeating draw 0 shows a defect in every other call.
"""

MEMBERS_OF_ONE_AXIS: tuple[int | None, ...] = (None,) * 15 + (0, 1, 2, 3, 4)
"""Which members to draw, more often than in other families, because only cases of one axis have members."""

RECORDS_OF_ONE_AXIS = (False,) * 4 + (True,)


@Cases
def redistribute_cases(draw: Draw, space: Space) -> RedistributeCase:
    """Draws a third of the cases on two axes. Shrinks to one draw of dense values for one replicated element."""
    world_size = pick(draw, "world_size", space.world_sizes)
    dtype = pick(draw, "dtype", space.dtypes)
    mesh = pick(draw, "mesh", meshes_of(world_size), kind_of_mesh)
    mesh_shape = mesh or (world_size,)
    shape = _pick_global_shape(draw, world_size)
    road = pick(draw, "road", ROADS_DRAWN)
    source = _pick_source(draw, shape, len(mesh_shape), operands=road != "distribute")
    target = _pick_target(draw, shape, source)
    target = ("replicate",) * len(mesh_shape) if road == "full_tensor" else target
    members = pick_members(draw, world_size, MEMBERS_OF_ONE_AXIS)
    records, async_op = pick(draw, "records", RECORDS_OF_ONE_AXIS), pick(draw, "async_op", (False, False, True))
    cotangent = _pick_cotangent(draw, shape, target, plain=road in ("local", "full_tensor"))
    grad_source = _pick_grad_source(draw, source, cotangent) if road in ("local", "full_tensor") else ()
    values = pick_values(draw, REDISTRIBUTE_MODES)
    if "partial(sum)" in grad_source:
        values = tuple(("dense" if mode == "special" else mode, seed) for mode, seed in values)
    source_rank = pick(draw, "source_rank", (0, 0, 1))
    is_from_other = road == "distribute" and source_rank < min(mesh_shape)
    dtypes = _pick_dtypes(draw, space, dtype, source, cotangent or target) if road != "full_tensor" else ("", "")
    checks = pick(draw, "checks", (False, False, True)) and road != "distribute"
    is_documented = not (mesh or grad_source or any(dtypes) or checks or (is_from_other and source_rank))
    return RedistributeCase(
        world_size=world_size,
        dtype=dtype,
        mesh=mesh,
        flattened=bool(mesh) and pick(draw, "flattened", (False, False, True)),
        shape=shape,
        source=source,
        target=target,
        cotangent=cotangent,
        road=road,
        source_rank=source_rank if is_from_other else 0,
        grad_source=grad_source,
        states_shape=pick(draw, "states_shape", (True, False))
        or road == "distribute"
        or not _is_even(shape, source, mesh_shape),
        checks=checks,
        from_end=pick(draw, "from_end", (False, False, True)),
        async_op=async_op and road != "full_tensor",
        forward_dtype=dtypes[0],
        backward_dtype=dtypes[1],
        **pick_gradients(draw, ("x",)),
        values=values,
        poison=pick(draw, "poison", POISON_TABLE),
        repeats=pick(draw, "repeats", REPEATS),
        records=records and is_documented,
        members=() if mesh or checks else members,  # run_check gathers from the whole world: finding 135
    )


@Cases
def refused_redistribute_cases(draw: Draw, space: Space) -> RefusedRedistributeCase:
    """Draws placements that do not fit the tensor or the mesh. Every rank can see the misfit."""
    world_size = pick(draw, "world_size", space.world_sizes)
    dtype = pick(draw, "dtype", space.dtypes)
    mesh = pick(draw, "mesh", meshes_of(world_size), kind_of_mesh)
    shape = _pick_global_shape(draw, world_size)
    source = _pick_source(draw, shape, max(len(mesh), 1), operands=False)
    return RefusedRedistributeCase(
        misfit=pick(draw, "misfit", MISFITS),
        world_size=world_size,
        dtype=dtype,
        mesh=mesh,
        shape=shape,
        source=source,
        target=_pick_target(draw, shape, source),
        values=pick_values(draw, REFUSED_MODES),
    )


@cache
def meshes_of(world_size: int) -> tuple[Shape, ...]:
    """Returns a table of meshes. Two in three are (), for one axis. Pairs of sizes without a 1 occur five times."""
    pairs = [(size, world_size // size) for size in range(1, world_size + 1) if world_size % size == 0]
    wide = [pair for pair in pairs if 1 not in pair]
    two_axes = [*pairs, *wide * 4]
    return ((),) * 2 * len(two_axes) + tuple(two_axes)


def is_given(number: int | None) -> bool:
    return number is not None


def _pick_global_shape(draw: Draw, world_size: int) -> Shape:
    num_dims = pick(draw, "dims", NUM_DIMS)
    sizes = _sizes(world_size, max(MAX_SIZES[num_dims], world_size + 1))
    shape = [
        pick(draw, f"dim {dim}", sizes, residues(world_size) if dim < 2 else free) for dim in range(max(NUM_DIMS))
    ][:num_dims]
    empty = pick(draw, "no elements", NO_ELEMENTS, is_given)
    if empty is not None and shape:
        shape[empty % num_dims] = 0
    return tuple(shape)


@cache
def _sizes(world_size: int, largest: int) -> tuple[int, ...]:
    """Returns the sizes of `edge_sizes` up to `largest`. Sizes that the ranks do not divide evenly occur twice."""
    edges = [size for size in edge_sizes(world_size) if size <= largest]
    uneven = [size for size in edges if size % world_size]
    return tuple(sorted([*uneven, *uneven, *(set(edges) - set(uneven))]))


def _shards(shape: Shape) -> tuple[str, ...]:
    return tuple(f"shard({dim})" for dim in range(len(shape)))


def _nested(placements: list[str]) -> list[str]:
    """Returns the last placement twice if it is a shard: most failures occur if two axes shard the same dim."""
    return placements[-1:] * 2 if placements and placements[-1].startswith("shard") else []


def _pick_source(draw: Draw, shape: Shape, num_axes: int, *, operands: bool) -> tuple[str, ...]:
    op = pick(draw, "op", OPS)
    partial = ("partial",) * 6 if operands else ()  # six of the sixteen entries for two dims
    found: list[str] = []
    for axis in range(num_axes):
        table = (*WHOLE, *partial, *_shards(shape) * 4, *_nested(found))
        found.append(pick(draw, f"source {axis}", table))
    return tuple(f"partial({op})" if text == "partial" else text for text in found)


def _pick_target(draw: Draw, shape: Shape, source: tuple[str, ...]) -> tuple[str, ...]:
    """Draws a placement for each axis. Only an axis on which the source is partial may get a partial target."""
    found: list[str] = []
    for axis, text in enumerate(source):
        target = pick(draw, f"target {axis}", (*WHOLE, *_shards(shape) * 6, *_nested(found)))
        stays = pick(draw, f"stays {axis}", STAYS_PARTIAL)
        found.append(text if stays and text.startswith("partial") else target)
    return tuple(found)


def _pick_cotangent(draw: Draw, shape: Shape, target: tuple[str, ...], *, plain: bool) -> tuple[str, ...]:
    """Draws the cotangent's placements, or () for the output's placements.

    If `plain` is True, the output is a plain tensor, and the cotangent must have the output's local shape.
    """
    is_other = pick(draw, "other cotangent", COTANGENTS)
    whole = ("replicate", "partial(sum)", "partial(sum)")
    found = []
    for axis, text in enumerate(target):
        anything = pick(draw, f"cotangent {axis}", (*whole, *_shards(shape)))
        whole_text = pick(draw, f"whole cotangent {axis}", whole)
        found.append(anything if not plain else text if text.startswith("shard") else whole_text)
    return tuple(found) if is_other else ()


def _pick_grad_source(draw: Draw, source: tuple[str, ...], cotangent: tuple[str, ...]) -> tuple[str, ...]:
    """Draws the placements of the local tensor's gradient, or () for the placements that torch chooses.

    The gradient is partial only if the cotangent is not.
    """
    is_given = pick(draw, "grad_source", (False, False, True))
    is_partial = any(text.startswith("partial") for text in cotangent)
    table = ("replicate", "partial(sum)")
    drawn = [pick(draw, f"grad_source {axis}", table) for axis in range(len(source))]
    found = (
        text if text.startswith("shard") else table[0] if is_partial else other
        for text, other in zip(source, drawn, strict=True)
    )
    return tuple(found) if is_given else ()


def _pick_dtypes(
    draw: Draw, space: Space, dtype: str, source: tuple[str, ...], cotangent: tuple[str, ...]
) -> tuple[str, str]:
    """Draws `forward_dtype` and `backward_dtype`, mostly ''. A sum gets no dtype that would round its terms."""
    table = ("",) * 2 * len(space.dtypes) + tuple(space.dtypes)
    forward, backward = (pick(draw, name, table) for name in ("forward_dtype", "backward_dtype"))
    ops = (_reduction_of(source), _reduction_of(cotangent))
    choices = ((forward, backward), (forward, ""), ("", backward))
    return next((each for each in choices if fits_sums(dtype, each, ops)), ("", ""))


def _reduction_of(texts: tuple[str, ...]) -> str:
    placements = map(parse_placement, texts)
    return next((placement.op for placement in placements if isinstance(placement, Partial)), "")


def _is_even(shape: Shape, source: tuple[str, ...], mesh_shape: Shape) -> bool:
    """True if all shards have equal size, which torch assumes if it gets no global shape."""
    placements = [parse_placement(text) for text in source]
    for dim, size in enumerate(shape):
        ranks = math.prod(mesh_shape[axis] for axis, each in enumerate(placements) if each == Shard(dim))
        if size % ranks:
            return False
    return True


def moves_of(space: Space, depth: int, part: int) -> list[RedistributeCase]:
    """Returns each redistribution of shards of dim 0 and partial sums on a mesh of 2 x 2 ranks, at every depth.

    Both axes may shard dim 0. Torch then knows shortcuts for sizes that the ranks divide evenly, so there are two
    sizes.
    """
    texts = ("replicate", "shard(0)", "partial(sum)")
    moves = [
        (source, target)
        for source in itertools.product(texts, repeat=2)
        for target in itertools.product(texts[:2], repeat=2)
        if source != target
    ]
    return [
        RedistributeCase(
            world_size=4,
            dtype=dtype,
            mesh=(2, 2),
            shape=(size, 3),
            source=source,
            target=target,
            values=(("dense", 1),),
        )
        for dtype in space.dtypes[:1]
        for source, target in moves
        for size in (8, 5)
    ]


ENUMERATION = Enumeration(moves_of, {4: 1})
"""The redistributions of `redistribute` on 2 x 2 ranks."""
