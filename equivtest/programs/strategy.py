"""Cases of a module of anybody's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivtest.cases.case import Shape
from equivtest.cases.picks import pick, pick_run
from equivtest.programs.case import ModuleCase
from equivtest.property import Space

MODULE_MODES = {mode: tuple((mode,) * num for num in (1, 2, 3)) for mode in ModuleCase.VALUE_MODES}

Layout = tuple[str, Shape | tuple[tuple[str, int], ...], int, bool]
"""(mode, x_shape or sizes, largest magnitude, by_parts) of a case."""

Layouts = Mapping[int, Mapping[Shape, Mapping[str, Sequence[Layout]]]]
"""World size -> mesh -> dtype -> layouts of cases, the simplest first; no mesh and no dtype without any."""

Options = tuple[tuple[str, str], ...]
"""(name, code of the value) of each option of a program."""


@st.composite
def module_cases(
    draw: DrawFn, space: Space, make: Callable[..., ModuleCase], varied: str, layouts: Layouts
) -> ModuleCase:
    """Cases of one module, and of one way to parallelize it.

    Args:
        make: A case from all that is drawn.
        varied: Which field holds what layouts differ in: 'x_shape' or 'sizes'.
        layouts: What is drawn of, for each of the space's world sizes.
    """
    world_size = pick(draw, "world_size", space.world_sizes)
    meshes = tuple(layouts[world_size])
    mesh = pick(draw, "mesh", meshes) if len(meshes) > 1 else meshes[0]
    dtype = pick(draw, "dtype", tuple(layouts[world_size][mesh]))
    mode, layout, largest, by_parts = pick(draw, "layout", layouts[world_size][mesh][dtype])
    return make(
        world_size=world_size,
        mesh=mesh,
        dtype=dtype,
        largest=largest,
        by_parts=by_parts,
        **pick_run(draw, world_size, MODULE_MODES[mode], records=()),
        **{varied: layout},
    )


@st.composite
def option_cases(draw: DrawFn, variants: Mapping[Options, SearchStrategy[ModuleCase]]) -> ModuleCase:
    """Cases of a program under each of its options; failures shrink to the first value of each.

    Args:
        variants: The options' names and values -> the cases; all have the same names.
    """
    remaining = list(variants)
    for place, (name, _) in enumerate(remaining[0]):
        value = pick(draw, f"option {name}", tuple(dict.fromkeys(each[place][1] for each in remaining)))
        remaining = [each for each in remaining if each[place][1] == value]
    return draw(variants[remaining[0]])
