"""Cases of a module of anybody's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from equivtest.families.module.case import ModuleCase
from equivtest.kit.case import Shape
from equivtest.kit.picks import pick, pick_run
from equivtest.property import Space

MODULE_MODES = {mode: tuple((mode,) * num for num in (1, 2, 3)) for mode in ModuleCase.VALUE_MODES}

Layouts = Mapping[int, Mapping[str, Sequence[tuple[str, Shape, int]]]]
"""World size -> dtype -> (mode, x_shape, largest) of cases, the simplest first; no dtype without any."""


@st.composite
def module_cases(
    draw: DrawFn, space: Space, *, build: str, parallelize: str, batch: str, layouts: Layouts
) -> ModuleCase:
    """Cases of one module, and of one way to parallelize it.

    Args:
        build, parallelize, batch: See `ModuleCase`.
        layouts: What is drawn of, for each of the space's world sizes.
    """
    world_size = pick(draw, "world_size", space.world_sizes)
    dtype = pick(draw, "dtype", tuple(layouts[world_size]))
    mode, x_shape, largest = pick(draw, "layout", layouts[world_size][dtype])
    return ModuleCase(
        world_size=world_size,
        dtype=dtype,
        build=build,
        parallelize=parallelize,
        x_shape=x_shape,
        largest=largest,
        batch=batch,
        **pick_run(draw, world_size, MODULE_MODES[mode], records=()),
    )
