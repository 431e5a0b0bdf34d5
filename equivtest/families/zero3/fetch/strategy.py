"""Draws cases of a fetch of parameters, within the contract and outside of it."""

from __future__ import annotations

import math

from equivtest.cases.case import Shape
from equivtest.cases.picks import (
    RECORDS,
    REFUSED_MODES,
    Cases,
    Draw,
    free,
    itself,
    pick,
    pick_run,
    pick_shape,
    pick_values,
)
from equivtest.families.zero3.fetch.case import PADDINGS, FetchCase, RefusedFetchCase
from equivtest.property import Space

FETCH_DRAWS = ("special", "index", "wide", "dense", "special")
FETCH_MODES = (("dense",), ("index",), ("wide",), ("special",), *[FETCH_DRAWS] * 21)
"""Modes of the draws of one case.

Most cases have an odd number of draws, so that repeating draw 0 shows a defect in every other call.
"""
NUM_PARAMETERS = (1, 2, 2, 3, 3, 4, 4, 5, 5)
NUM_PARAMETER_DIMS = (1, 0, 1, 1, 1, 2, 2, 2, 3, 4)
ZERO_NUMEL_SHAPES: tuple[Shape | None, ...] = (None,) * 45 + ((0,), (0, 3), (2, 0))
MISFITS_OF_FETCH = ("dtype", "in_flight")


@Cases
def fetch_cases(draw: Draw, space: Space, *, collective: str = "") -> FetchCase:
    """Shrinks to one draw of dense values for one parameter of one element."""
    world_size = pick(draw, "world_size", space.world_sizes)
    dtype = pick(draw, "dtype", space.dtypes)
    num_parameters = pick(draw, "num_parameters", NUM_PARAMETERS)
    picked = [pick_parameter(draw, f"parameter {index}", world_size) for index in range(num_parameters)]
    no_padding = pick(draw, "no padding", (False, False, False, True))
    return FetchCase(
        world_size=world_size,
        dtype=dtype,
        parameters=tuple(_without_padding(shape, world_size) if no_padding else shape for shape, _ in picked),
        requires_grad=tuple(flag for _, flag in picked),
        padding=pick(draw, "padding", PADDINGS),
        contiguous=pick(draw, "contiguous", (True, False)),
        collective=collective,
        **pick_run(draw, world_size, FETCH_MODES, records=RECORDS if collective else (False,)),
    )


@Cases
def refused_fetch_cases(draw: Draw, space: Space) -> RefusedFetchCase:
    """Draws parameters that cannot be fetched together. Each has elements."""
    world_size = pick(draw, "world_size", space.world_sizes)
    dtype = pick(draw, "dtype", space.dtypes)
    misfit = pick(draw, "misfit", MISFITS_OF_FETCH)
    num_parameters = pick(draw, "num_parameters", (2, 3) if misfit == "dtype" else (1, 2, 3))
    parameters = [pick_shape(draw, f"parameter {index}", world_size, NUM_PARAMETER_DIMS) for index in range(3)]
    return RefusedFetchCase(
        misfit=misfit,
        world_size=world_size,
        dtype=dtype,
        parameters=tuple(parameters[:num_parameters]),
        requires_grad=(True,) * num_parameters,
        values=pick_values(draw, REFUSED_MODES),
    )


def pick_parameter(draw: Draw, name: str, world_size: int) -> tuple[Shape, bool]:
    """Draws a shape, and whether the parameter requires a gradient. One shape in sixteen has no elements.

    The draws of one parameter follow each other, so that shrinking can drop a parameter. A covering array covers the
    first parameter only.
    """
    covers = name == "parameter 0"
    shape = pick_shape(draw, name, world_size, NUM_PARAMETER_DIMS, covers=covers)
    zero_numel = pick(draw, f"{name}: zero numel", ZERO_NUMEL_SHAPES, bool if covers else free)
    requires_grad = pick(draw, f"{name}: requires_grad", (True, True, False), itself if covers else free)
    return (shape if zero_numel is None else zero_numel), requires_grad


def _without_padding(shape: Shape, world_size: int) -> Shape:
    """Returns the shape, with a longer first dim if the number of elements is no multiple of the world size."""
    if math.prod(shape) % world_size == 0:
        return shape
    return (shape[0] * world_size, *shape[1:]) if shape else (world_size,)
