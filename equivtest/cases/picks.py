"""Makes the cases of a class from the axes of its fields, and defines draws that families share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from equivtest.cases import axes
from equivtest.cases.axes import (
    LARGE_DIMS,
    MAX_EDGE,
    POISON_TABLE,
    RECORDS,
    REPEATS,
    SMALL_SIZES,
    Draw,
    Label,
    axes_of,
    draw_fields,
    edge_sizes,
    free,
    is_even,
    is_several,
    itself,
    kind_of_mesh,
    kinds_of_gradients,
    modulo,
    residues,
    shards,
    subsets,
)
from equivtest.cases.built import Cases, builder_of, dangerous_axes
from equivtest.cases.case import C
from equivtest.cases.drawing import Drawing
from equivtest.property import Space

T = TypeVar("T")
P = ParamSpec("P")
REFUSED_MODES = (("dense",),)
NUM_LEADING_DIMS = (1, 0, 1, 1, 1, 2, 2, 3)
NUM_SEQUENCE_DIMS = (1, 1, 2, 2, 3)


def cases_of(
    case_type: type[C],
    only: Collection[str] = (),
    without: Collection[str] = (),
    dangerous: tuple[str, ...] = (),
) -> Cases[C]:
    """Returns the cases of a class, drawn from the axes of its fields.  A call of the result may fix fields by keyword.

    Args:
        only: Fields that are drawn, beside the world size, the dtype and the values. If empty, all fields that have an
            axis are drawn.
        without: Fields that are not drawn.
    """

    def build(draw: Draw, space: Space, **fixed: Any) -> C:
        names = (*only, "values") if only else set(axes_of(case_type)) - set(without)  # type: ignore[arg-type]
        return case_type(**draw_fields(draw, names, case_type, space, fixed))

    return Cases(build, dangerous)


def _for_any_draw(pick: Callable[Concatenate[Draw, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Makes a `pick` that takes a `Draw` also take the draw function of Hypothesis."""

    @functools.wraps(pick)
    def picked(draw: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return pick(Drawing(draw) if callable(draw) else draw, *args, **kwargs)

    return picked


def _pick(draw: Draw, name: str, table: Sequence[T], label: Label = itself) -> T:
    return draw.pick(name, table, label)


def _pick_x_is_dtensor(draw: Draw, shape: tuple[int, ...], input_layout: str, world_size: int) -> bool:
    """Draws `x_is_dtensor`: True for an uneven x, because torch cannot infer its global shape from a plain shard."""
    needed = not is_even(shape, input_layout, world_size)
    return draw.pick("x_is_dtensor", (False, True)) or needed


def _pick_gradients(draw: Draw, names: tuple[str, ...]) -> dict[str, Any]:
    return {
        "requires_grad": draw.pick("requires_grad", subsets(names), kinds_of_gradients(names)),
        "x_contiguous": draw.pick("x_contiguous", (True, False)),
        "cotangent_contiguous": draw.pick("cotangent_contiguous", (True, False)),
    }


def _pick_run(
    draw: Draw, world_size: int, modes_table: tuple[tuple[str, ...], ...], *, records: tuple[bool, ...] = RECORDS
) -> dict[str, Any]:
    """Draws the fields that every case has besides its mathematics, without `records` if there is nothing to draw."""
    fields: dict[str, Any] = {
        "values": axes.pick_values(draw, modes_table),
        "poison": draw.pick("poison", POISON_TABLE),
        "repeats": draw.pick("repeats", REPEATS),
    }
    if records:
        fields["records"] = draw.pick("records", records)
    return fields | {"members": axes.pick_members(draw, world_size)}


pick = _for_any_draw(_pick)
pick_shape = _for_any_draw(axes.pick_shape)
pick_members = _for_any_draw(axes.pick_members)
pick_values = _for_any_draw(axes.pick_values)
pick_x_is_dtensor = _for_any_draw(_pick_x_is_dtensor)
pick_gradients = _for_any_draw(_pick_gradients)
pick_run = _for_any_draw(_pick_run)

__all__ = [
    "LARGE_DIMS",
    "MAX_EDGE",
    "NUM_LEADING_DIMS",
    "NUM_SEQUENCE_DIMS",
    "POISON_TABLE",
    "RECORDS",
    "REFUSED_MODES",
    "REPEATS",
    "SMALL_SIZES",
    "Cases",
    "Draw",
    "builder_of",
    "cases_of",
    "dangerous_axes",
    "edge_sizes",
    "free",
    "is_even",
    "is_several",
    "itself",
    "kind_of_mesh",
    "modulo",
    "pick",
    "pick_gradients",
    "pick_members",
    "pick_run",
    "pick_shape",
    "pick_values",
    "pick_x_is_dtensor",
    "residues",
    "shards",
    "subsets",
]
