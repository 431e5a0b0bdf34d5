"""Builds cases of your program from tables: its options, meshes, dtypes, shapes and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from equivtest.cases.axes import Draw
from equivtest.cases.built import Cases
from equivtest.cases.case import Shape
from equivtest.programs.candidates import Candidate
from equivtest.programs.case import ModuleCase
from equivtest.property import Space

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

MODULE_MODES = {mode: tuple((mode,) * num for num in (1, 2, 3)) for mode in ModuleCase.VALUE_MODES}

Candidates = dict[int, Mapping[Shape, Mapping[str, Sequence[Candidate]]]]
"""World size -> mesh -> dtype -> candidates, the simplest first; without sizes, meshes and dtypes that have none."""

Chosen = tuple[tuple[str, str], ...]
"""(name, value as code) of each option of a program."""


class Judged(NamedTuple):
    """Builds cases of a program under one combination of its options.

    Attributes:
        make: Function that makes a case from the fields that differ.
        varied: Name of the field of a candidate's `choice`.
    """

    make: Callable[..., ModuleCase]
    varied: str
    candidates: Candidates


class ProgramCases(Cases[ModuleCase]):
    """The cases of a program.  Failures shrink to the first combination of options."""

    def __init__(self, judged_in: Callable[[Space], Mapping[Chosen, Judged]]) -> None:
        """`judged_in` returns the combinations of options that have cases in a space, or raises Misuse.

        It is called for every case, so its results should be cached.
        """
        super().__init__(self._build)
        self._judged_in = judged_in

    def __call__(self, space: Space, **more: Any) -> SearchStrategy[ModuleCase]:
        """Raises Misuse if no case of the space can be judged."""
        self._judged_in(space)
        return super().__call__(space, **more)

    def _build(self, draw: Draw, space: Space) -> ModuleCase:
        judged = self._judged_in(space)
        left = list(judged)
        for place, (name, _) in enumerate(left[0]):
            value = draw.pick(f"option {name}", tuple(dict.fromkeys(each[place][1] for each in left)))
            left = [each for each in left if each[place][1] == value]
        return _case_of(draw, judged[left[0]])


def _case_of(draw: Draw, judged: Judged) -> ModuleCase:
    from equivtest.cases.picks import pick_run  # imports Hypothesis

    world_size = draw.pick("world_size", tuple(judged.candidates))
    meshes = judged.candidates[world_size]
    mesh = draw.pick("mesh", tuple(meshes)) if len(meshes) > 1 else next(iter(meshes))
    dtype = draw.pick("dtype", tuple(meshes[mesh]))
    mode, choice, largest, by_parts = draw.pick(judged.varied, tuple(meshes[mesh][dtype]), _choice)
    fields: dict[str, Any] = pick_run(draw, world_size, MODULE_MODES[mode], records=())
    return judged.make(
        world_size=world_size,
        mesh=mesh,
        dtype=dtype,
        largest=largest,
        by_parts=by_parts,
        **fields,
        **{judged.varied: choice},
    )


def _choice(candidate: Candidate) -> Any:
    return candidate.choice
