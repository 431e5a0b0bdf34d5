"""Draws cases of your module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivtest.cases.case import Shape
from equivtest.cases.picks import pick, pick_run
from equivtest.programs.candidates import Candidate
from equivtest.programs.case import ModuleCase
from equivtest.property import Space

MODULE_MODES = {mode: tuple((mode,) * num for num in (1, 2, 3)) for mode in ModuleCase.VALUE_MODES}

Candidates = Mapping[int, Mapping[Shape, Mapping[str, Sequence[Candidate]]]]
"""World size -> mesh -> dtype -> candidates, the simplest first; without meshes and dtypes that have none."""

Options = tuple[tuple[str, str], ...]
"""(name, value as code) of each option of a program."""


@st.composite
def module_cases(
    draw: DrawFn, space: Space, make: Callable[..., ModuleCase], varied: str, candidates: Candidates
) -> ModuleCase:
    """Draws cases of one module that is parallelized in one way."""
    world_size = pick(draw, "world_size", space.world_sizes)
    meshes = tuple(candidates[world_size])
    mesh = pick(draw, "mesh", meshes) if len(meshes) > 1 else meshes[0]
    dtype = pick(draw, "dtype", tuple(candidates[world_size][mesh]))
    mode, choice, largest, by_parts = pick(draw, "layout", candidates[world_size][mesh][dtype])
    return make(
        world_size=world_size,
        mesh=mesh,
        dtype=dtype,
        largest=largest,
        by_parts=by_parts,
        **pick_run(draw, world_size, MODULE_MODES[mode], records=()),
        **{varied: choice},
    )


@st.composite
def option_cases(draw: DrawFn, variants: Mapping[Options, SearchStrategy[ModuleCase]]) -> ModuleCase:
    """Draws cases of a program under each combination of its options. Failures shrink to the first combination."""
    remaining = list(variants)
    for place, (name, _) in enumerate(remaining[0]):
        value = pick(draw, f"option {name}", tuple(dict.fromkeys(each[place][1] for each in remaining)))
        remaining = [each for each in remaining if each[place][1] == value]
    return draw(variants[remaining[0]])
