"""Draws that the families share: sizes at the edges of a division, meshes, modes and seeds of values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivtest.cases.case import Shape
from equivtest.layout import Layout, parse_placement, shard_bounds, shard_kind

T = TypeVar("T")
TILE_SIZES = {31, 32, 33}
MAX_EDGE = 33  # elements of a dim: exact values in bfloat16 allow about 250 terms of a sum
MAX_INNER = 16  # elements of the large dim where there are three leading ones, for the same reason
SMALL_SIZES = (1, 2, 3)  # of the dims beside the large one
LARGE_DIMS = tuple(range(12))  # which dim is the large one, modulo their number, 1 to 4
SEEDS = tuple(range(64))
REFUSED_MODES = (("dense",),)
POISON_TABLE = ("large", "large", "large", "nan", "nan", "none")
REPEATS = (False, False, False, True)
NUM_LEADING_DIMS = (1, 0, 1, 1, 1, 2, 2, 3)
RECORDS = (False,) * 7 + (True,)
MEMBERS: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((1,), (2,)),
    2: ((1, 0), (3, 1), (2, 0), (1, 3), (1, 2)),
    3: ((2, 0, 1), (3, 1, 0), (1, 2, 3)),
    4: ((3, 2, 1, 0), (1, 0, 3, 2)),
}
"""Meshes within a world of at most four processes by world size; not all ascend, some leave processes out."""
MEMBERS_DRAWN: tuple[int | None, ...] = (None,) * 25 + (0, 1, 2, 3, 4)
"""Which of them, modulo their number, or the whole world: one table for all world sizes, for shrinking's sake."""
NUM_SEQUENCE_DIMS = (1, 1, 2, 2, 3)


@cache
def edge_sizes(world_size: int) -> tuple[int, ...]:
    """Sizes of a dim, ascending, those that do not divide by the world size more often."""
    w = world_size
    near = {size + step for size in (w, 2 * w, 3 * w, w * w) for step in (-1, 0, 1)} | {1, 2, 3, 5, 7, 8}
    edges = {size for size in near if 1 <= size <= max(MAX_EDGE, w + 1)}
    empty = {size for size in range(1, MAX_EDGE) if shard_bounds(size, w, w - 1) == (size, size)}
    uneven = {size for size in edges | empty if size % w}
    even = edges - uneven
    return tuple(sorted([*uneven, *uneven, *even, *(uneven | TILE_SIZES), *(even if w > 2 else ())]))


@cache
def subsets(names: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """All names five times, then every other subset once, the empty one last."""
    others = [subset for num in range(len(names) - 1, -1, -1) for subset in combinations(names, num)]
    return (names,) * 5 + tuple(others)


def pick(draw: DrawFn, name: str, table: Sequence[T]) -> T:
    """An entry of `table`; `name` must be another one at every call for the same case.

    Entries carry the name, because Hypothesis takes draws from equal tables for the same thing: it
    then spends five examples in six on copies of one, with one draw repeated at another's place.
    Source: ConjectureRunner.generate_mutations_from, Hypothesis 6.170.
    """
    entries: SearchStrategy[tuple[str, T]] = _entries(name, tuple(table), tuple(map(type, table)))
    return draw(entries)[1]


@cache
def _entries(name: str, table: tuple[T, ...], types: tuple[type, ...]) -> SearchStrategy[tuple[str, T]]:
    """Made once, since that takes as long as all else of a draw; `types` tells a table of True from one of 1."""
    return st.sampled_from([(name, entry) for entry in table])


def pick_shape(draw: DrawFn, name: str, world_size: int, num_dims_table: tuple[int, ...]) -> Shape:
    """A shape with an edge size in one dim, any one, beside small ones."""
    num_dims = pick(draw, f"{name}: dims", num_dims_table)
    max_size = MAX_INNER if num_dims > 2 else max(edge_sizes(world_size))
    edge = pick(draw, f"{name}: edge", [size for size in edge_sizes(world_size) if size <= max_size])
    large_dim = pick(draw, f"{name}: large dim", LARGE_DIMS)
    small = [pick(draw, f"{name}: dim {dim}", SMALL_SIZES) for dim in range(max(num_dims_table) - 1)]
    if num_dims == 0:
        return ()
    shape = [min(size, 2) if num_dims > 2 else size for size in small[: num_dims - 1]]
    shape.insert(large_dim % num_dims, edge)
    return tuple(shape)


def pick_x_is_dtensor(draw: DrawFn, shape: Shape, input_layout: str, world_size: int) -> bool:
    """True where torch could not tell the global shape from a plain tensor, else either."""
    needed = shard_kind(shape, Layout((parse_placement(input_layout),)), (world_size,)) != "even"
    return pick(draw, "x_is_dtensor", (False, True)) or needed


def pick_members(draw: DrawFn, world_size: int, table: tuple[int | None, ...] = MEMBERS_DRAWN) -> tuple[int, ...]:
    """The whole world, or one time in six a mesh within a larger one or in another order.

    Args:
        table: Which of MEMBERS, modulo their number, or None for the whole world.
    """
    meshes = MEMBERS.get(world_size, (tuple(reversed(range(world_size))),))
    drawn = pick(draw, "members", table)
    return () if drawn is None else meshes[drawn % len(meshes)]


def pick_values(draw: DrawFn, modes_table: tuple[tuple[str, ...], ...], name: str = "") -> tuple[tuple[str, int], ...]:
    """(mode, seed) of each draw of values."""
    modes = pick(draw, f"{name}modes", modes_table)
    seeds = [pick(draw, f"{name}seed {index}", SEEDS) for index in range(len(modes_table[-1]))]
    return tuple(zip(modes, seeds, strict=False))


def pick_gradients(draw: DrawFn, names: tuple[str, ...], x: str = "x") -> dict[str, Any]:
    """Fields of a case with a backward: which of `names` need a gradient, and what is handed out contiguous.

    Args:
        x: The input; its memory, and the cotangent's, may be contiguous.
    """
    return {
        "requires_grad": pick(draw, "requires_grad", subsets(names)),
        f"{x}_contiguous": pick(draw, f"{x}_contiguous", (True, False)),
        "cotangent_contiguous": pick(draw, "cotangent_contiguous", (True, False)),
    }


def pick_run(
    draw: DrawFn, world_size: int, modes_table: tuple[tuple[str, ...], ...], *, records: tuple[bool, ...] = RECORDS
) -> dict[str, Any]:
    """Fields that every case has beside its mathematics: values, poison, repeats, records and members.

    They are drawn in this order, which fixes the cases that a seed gives; strategies draw them last.

    Args:
        records: What `records` is drawn from; left out of the fields where it is empty.
    """
    fields: dict[str, Any] = {
        "values": pick_values(draw, modes_table),
        "poison": pick(draw, "poison", POISON_TABLE),
        "repeats": pick(draw, "repeats", REPEATS),
    }
    if records:
        fields["records"] = pick(draw, "records", records)
    return fields | {"members": pick_members(draw, world_size)}
