"""Axes: the values that a field of a case is drawn from, declared beside the field.

`num_embeddings: Annotated[int, Within(1, 64), SIZES]` declares the axis SIZES, which draws sizes near multiples of the
world size.  Two kinds of fields have an axis without declaring it: `style: Annotated[str, OneOf(STYLES)]` is drawn from
STYLES, and a bool is drawn from True and False.

An axis has a table of entries.  The first entry is the simplest.  For a bool and for `OneOf` the first entry is the
default of the field.  In the profile `soak`, and when a failure shrinks, Hypothesis chooses entries.  All other
profiles take entries from a covering array (`equivtest.search.covering`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from functools import cache
from inspect import get_annotations
from itertools import combinations
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from equivtest.cases.rules import OneOf
from equivtest.layout import Layout, parse_placement, shard_bounds, shard_kind

if TYPE_CHECKING:
    from equivtest.cases.case import Case, Shape
    from equivtest.property import Space

T = TypeVar("T")
Fields = Mapping[str, Any]
"""Name -> value of each field that was already drawn."""

Label = Callable[[Any], Hashable]
"""Function from an entry of a table to the entry's class.  A covering array covers classes, not entries."""


def itself(entry: T) -> T:
    """Returns the entry.  As a `Label`, this function puts each entry of a table into a separate class."""
    return entry


def free(entry: object) -> None:
    """Returns None.  As a `Label`, this function puts all entries of a table, such as seeds, into one class."""


def is_several(number: int) -> bool:
    return number > 1


def kind_of_mesh(mesh: Shape) -> tuple[bool, ...]:
    """Returns one bool for each axis of the mesh, True if the axis has several ranks: `(2, 1) -> (True, False)`.

    As a `Label`, it puts meshes into classes, so that a covering array need not combine other values with each mesh.
    """
    return tuple(map(is_several, mesh))


class Draw(Protocol):
    """Picks an entry of each table. Hypothesis chooses the entry, or a row of a covering array determines it."""

    def pick(self, name: str, table: Sequence[T], label: Label = itself) -> T:
        """Returns an entry of `table`, whose first entry is the simplest.

        Args:
            name: Name of the axis. Each call for the same case must have another name.
            label: Function from an entry to its class, such as the residue of a size.
        """
        ...


@dataclass(frozen=True)
class Axis:
    """The set of values from which a field is drawn."""

    pick: Callable[[Draw, str, Fields], Any]


def table(*entries: Any, label: Label = itself) -> Axis:
    """Returns the axis of these entries. An entry that is listed twice is drawn twice as often."""
    return Axis(lambda draw, name, fields: draw.pick(name, entries, label))


def table_of(entries: Callable[[Fields], Sequence[Any]], label: Label = itself) -> Axis:
    """Returns an axis whose entries depend on the fields that were drawn before."""
    return Axis(lambda draw, name, fields: draw.pick(name, tuple(entries(fields)), label))


TILE_SIZES = {31, 32, 33}
MAX_EDGE = 33  # elements of a dim: exact values in bfloat16 allow about 250 terms of a sum
MAX_INNER = 16  # elements of the large dim behind three leading ones, for the same reason
SMALL_SIZES = (1, 2, 3)  # of the dims beside the large one
LARGE_DIMS = tuple(range(12))  # which dim is the large one, modulo their number, 1 to 4


@cache
def edge_sizes(world_size: int) -> tuple[int, ...]:
    """Returns sizes near multiples of the world size, ascending.

    Sizes that the ranks cannot divide evenly are listed, and so drawn, more often than others.
    """
    w = world_size
    near = {size + step for size in (w, 2 * w, 3 * w, w * w) for step in (-1, 0, 1)} | {1, 2, 3, 5, 7, 8}
    edges = {size for size in near if 1 <= size <= max(MAX_EDGE, w + 1)}
    empty = {size for size in range(1, MAX_EDGE) if shard_bounds(size, w, w - 1) == (size, size)}
    uneven = {size for size in edges | empty if size % w}
    even = edges - uneven
    return tuple(sorted([*uneven, *uneven, *even, *(uneven | TILE_SIZES), *(even if w > 2 else ())]))


@cache
def residues(world_size: int) -> Label:
    """Returns a `Label` that puts the size of a dim into one of four classes, by how `world_size` ranks divide the dim.

    The class is 'empty shard' if the last rank has no element.
    """

    def residue(size: int) -> str:
        if size % world_size == 0:
            return "divisible"
        if size < world_size:
            return "fewer than ranks"
        return "empty shard" if shard_bounds(size, world_size, world_size - 1) == (size, size) else "uneven"

    return residue


@cache
def modulo(num: int) -> Label:
    return lambda number: number % num


def pick_size(draw: Draw, name: str, fields: Fields) -> int:
    world_size = fields["world_size"]
    return draw.pick(name, edge_sizes(world_size), residues(world_size))


SIZES = Axis(pick_size)


def pick_shape(
    draw: Draw, name: str, world_size: int, num_dims_table: tuple[int, ...], *, covers: bool = True
) -> Shape:
    """Draws a shape.  The size of one dim, which is drawn too, comes from `edge_sizes`.  All other dims are small.

    Args:
        num_dims_table: Numbers of dims to draw from.
        covers: If False, a covering array treats all shapes as one value. It then need not combine each shape with each
            value of other axes.
    """
    num_dims = draw.pick(f"{name}: dims", num_dims_table, itself if covers else free)
    max_size = MAX_INNER if num_dims > 2 else max(edge_sizes(world_size))
    edges = [size for size in edge_sizes(world_size) if size <= max_size]
    edge = draw.pick(f"{name}: edge", edges, residues(world_size) if covers else free)
    large_dim = draw.pick(f"{name}: large dim", LARGE_DIMS, modulo(max(1, num_dims)) if covers else free)
    small = [draw.pick(f"{name}: dim {dim}", SMALL_SIZES, free) for dim in range(max(num_dims_table) - 1)]
    if num_dims == 0:
        return ()
    shape = [min(size, 2) if num_dims > 2 else size for size in small[: num_dims - 1]]
    shape.insert(large_dim % num_dims, edge)
    return tuple(shape)


def shapes(num_dims_table: tuple[int, ...]) -> Axis:
    return Axis(lambda draw, name, fields: pick_shape(draw, name, fields["world_size"], num_dims_table))


def shards(num_dims: int) -> tuple[str, ...]:
    """Lists, for each dim, the placement that shards this dim: 2 -> ('shard(0)', 'shard(1)')."""
    return tuple(f"shard({dim})" for dim in range(num_dims))


def is_even(shape: Shape, layout: str, world_size: int) -> bool:
    return shard_kind(shape, Layout((parse_placement(layout),)), (world_size,)) == "even"


def dtensor_or_plain(shape: Shape, layout: str, world_size: int) -> tuple[bool, bool]:
    """Returns the table for the field `x_is_dtensor`: (False, True) for an even x, and (True, True) for an uneven x.

    An uneven x is always a DTensor, because torch cannot infer the global shape from a plain uneven shard.  Both tables
    have two entries, so that Hypothesis makes one choice for every x.  If only an even x had a choice, shrinking could
    drop this choice only together with all later choices.
    """
    return not is_even(shape, layout, world_size), True


@cache
def subsets(names: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Lists the subsets of names: all names five times, then every other subset once, the empty subset last."""
    others = [subset for num in range(len(names) - 1, -1, -1) for subset in combinations(names, num)]
    return (names,) * 5 + tuple(others)


@cache
def kinds_of_gradients(names: tuple[str, ...]) -> Label:
    """Returns a `Label` that puts subsets of `names` into five classes.  The first of the names is the input."""

    def kind(subset: tuple[str, ...]) -> str:
        if subset in ((), names):
            return "all" if subset else "none"
        return "input alone" if subset == names[:1] else "no input" if names[0] not in subset else "some"

    return kind


def gradients(names: Callable[[Fields], tuple[str, ...]]) -> Axis:
    """Returns the axis of a field that lists the tensors that need a gradient.  Most draws list all `names`."""

    def pick(draw: Draw, name: str, fields: Fields) -> Any:
        return draw.pick(name, subsets(names(fields)), kinds_of_gradients(names(fields)))

    return Axis(pick)


SEEDS = tuple(range(64))


def pick_values(draw: Draw, modes_table: tuple[tuple[str, ...], ...], name: str = "") -> tuple[tuple[str, int], ...]:
    """Draws the field `values` of a case: (mode, seed) of one or more draws."""
    modes = draw.pick(f"{name}modes", modes_table, free)
    seeds = [draw.pick(f"{name}seed {index}", SEEDS, free) for index in range(len(modes_table[-1]))]
    return tuple(zip(modes, seeds, strict=False))


MEMBERS: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((1,), (2,)),
    2: ((1, 0), (3, 1), (2, 0), (1, 3), (1, 2)),
    3: ((2, 0, 1), (3, 1, 0), (1, 2, 3)),
    4: ((3, 2, 1, 0), (1, 0, 3, 2)),
}
"""World size -> meshes within at most four processes.  Some do not ascend, some leave processes out."""
MEMBERS_DRAWN: tuple[int | None, ...] = (None,) * 25 + (0, 1, 2, 3, 4)
"""Indices into MEMBERS[world_size], modulo its length.  None stands for the whole world.

One table for all world sizes shrinks well.
"""


def pick_members(draw: Draw, world_size: int, drawn: tuple[int | None, ...] = MEMBERS_DRAWN) -> tuple[int, ...]:
    """Draws the field `members`: the processes that make up the mesh.

    In five of six draws the field is (), which stands for the whole world in order.  If MEMBERS has no entry for the
    world size, every other draw is the ranks in reversed order.

    Args:
        drawn: The table to draw from, in the form of MEMBERS_DRAWN.
    """
    meshes = MEMBERS.get(world_size, (tuple(reversed(range(world_size))),))
    number = draw.pick("members", drawn, _kinds_of_mesh(meshes))
    return () if number is None else meshes[number % len(meshes)]


@cache
def _kinds_of_mesh(meshes: tuple[tuple[int, ...], ...]) -> Label:
    def kind(number: int | None) -> str:
        if number is None:
            return "the world"
        mesh = meshes[number % len(meshes)]
        return "part of a world" if max(mesh) >= len(mesh) else "another order"

    return kind


MEMBERS_OF_WORLD = Axis(lambda draw, name, fields: pick_members(draw, fields["world_size"]))
POISON_TABLE = ("large", "large", "large", "nan", "nan", "none")
REPEATS = (False, False, False, True)
RECORDS = (False,) * 7 + (True,)
RUN = ("values", "poison", "repeats", "records", "members")
"""Fields that every case has besides its mathematics.  They are drawn last."""


def draw_fields(
    draw: Draw, names: Collection[str], case_type: type[Case], space: Space, fixed: Fields
) -> dict[str, Any]:
    """Returns field -> value.  World size, dtype and `names` are drawn, except the fields in `fixed`.

    Fields are drawn in the order in which the class declares them, except that the fields in RUN come last.
    """
    drawn = {"world_size": draw.pick("world_size", space.world_sizes), "dtype": draw.pick("dtype", space.dtypes)}
    for name, axis in axes_of(case_type).items():  # type: ignore[arg-type]  # a class is hashable
        if name in fixed:
            drawn[name] = fixed[name]
        elif name in names and name not in drawn:
            drawn[name] = axis.pick(draw, name, drawn)
    return {**drawn, **fixed}


@cache
def axes_of(case_type: Any) -> dict[str, Axis]:
    """Returns field -> axis, for each field with an axis, in the order in which fields are drawn."""
    hints: dict[str, tuple[Any, ...]] = {}
    for base in reversed(case_type.__mro__):
        for name, hint in get_annotations(base, eval_str=True).items():
            hints[name] = (*getattr(hint, "__metadata__", ()), *hints.get(name, ()))
    own = {each.name: each for each in fields(case_type) if each.init}
    names = [name for name in own if name not in RUN] + [name for name in RUN if name in own]
    axes = {name: _axis_of(case_type, own[name], hints[name]) for name in names}
    return {name: axis for name, axis in axes.items() if axis is not None}


def _axis_of(case_type: type[Case], each: Field[Any], declared: Iterable[Any]) -> Axis | None:
    if each.name == "values":
        return Axis(lambda draw, name, fields: pick_values(draw, case_type.modes_drawn()))
    if axis := next((one for one in declared if isinstance(one, Axis)), None):
        return axis
    if rule := next((one for one in declared if isinstance(one, OneOf)), None):
        return table(*sorted(rule.values, key=lambda value: value != each.default))
    return table(each.default, not each.default) if each.type in ("bool", bool) else None
