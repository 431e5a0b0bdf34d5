"""Chooses the cases of a chunk before any case runs.

The cases depend only on equivtest's own seed, so that a commit draws the same cases everywhere.  Neither constants of
imported modules (`equivtest.search.local_constants`) nor settings of a Hypothesis profile change them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis.database import ExampleDatabase
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy

from equivtest.base import limits
from equivtest.base.profiles import Part
from equivtest.cases.case import Case
from equivtest.cases.picks import builder_of, dangerous_axes
from equivtest.property import Property, Space
from equivtest.search.covering import Array, covering_array
from equivtest.search.local_constants import no_local_constants

SETTINGS: dict[str, Any] = {
    "backend": "hypothesis",
    "database": None,
    "deadline": None,
    "derandomize": False,
    "print_blob": False,
    "report_multiple_bugs": False,
    "suppress_health_check": list(HealthCheck),
    "verbosity": Verbosity.quiet,
}


@dataclass(frozen=True)
class Chunk:
    """The part of a property's cases that one search runs.

    Attributes:
        seed: If 'gate', the cases are the fixed cases of this commit. Any other text gives other cases.
        per_cell: Number of conclusive verdicts that every claim must get in each cell. Further cases are added to get
            these verdicts (`equivtest.search.filling`).
        world_sizes: All world sizes of the run. A failure is shrunk to smaller world sizes, but not below 2.
        strength: Strength of the covering array from which the cases are taken. It is 0 if the cases are random.
        mixes_worlds: True if the array covers all world sizes. The chunk then has the cases of the array on the
            chunk's world size.
        depth: Depth of the property's enumeration, if the chunk is a part of an enumeration. Otherwise 0.
        examples: Number of the property's first examples that the chunk has. If None, the chunk has all examples.
        is_limited: True if devices or slots limit the number of processes. Then no case uses more processes than the
            run's largest world size. Otherwise a mesh may be a part of a larger world.
    """

    world_size: int
    dtypes: tuple[str, ...]
    index: int
    num_cases: int
    seed: str = "gate"
    per_cell: int = 0
    world_sizes: tuple[int, ...] = limits.WORLD_SIZES
    strength: int = 0
    mixes_worlds: bool = True
    depth: int = 0
    examples: int | None = None
    is_limited: bool = False

    def fitted(self, case: Case) -> Case:
        """Returns the case, whose mesh becomes the whole world if the run has too few processes for it."""
        has_room = not self.is_limited or case.num_processes <= max(self.world_size, *self.world_sizes)
        return case if has_room else replace(case, members=())

    @property
    def smaller_world_sizes(self) -> list[int]:
        """World sizes to which a failure of the chunk is shrunk, in ascending order.

        A single rank is left out: it exchanges nothing, so a failure on one rank has another cause.
        """
        return sorted(size for size in self.world_sizes if 1 < size < self.world_size)

    @property
    def space(self) -> Space:
        return Space((self.world_size,), self.dtypes)


def chunk_of(
    part: Part,
    dtypes: tuple[str, ...],
    seed: str = "gate",
    world_sizes: tuple[int, ...] = limits.WORLD_SIZES,
    *,
    is_limited: bool = False,
) -> Chunk:
    fields = dataclasses.asdict(part)
    return Chunk(dtypes=dtypes, seed=seed, world_sizes=world_sizes, is_limited=is_limited, **fields)


def seed_of(prop: Property, chunk: Chunk) -> int:
    claims = ",".join(claim.name for claim in prop.claims)
    text = f"{chunk.seed}|{prop.subject}|{claims}|{chunk.world_size}|{chunk.index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def chunk_cases(prop: Property, chunk: Chunk) -> list[Case]:
    """Returns the chunk's cases without duplicates: cases of the covering array, or random cases.

    Chunk 0 begins with examples of the property. It ends with a case of each aspect, such as 'uneven', that neither the
    chunk's other cases have nor the cases of the covering array that run on other numbers of ranks.  A part of an
    enumeration has only the cases that the enumeration lists.
    """
    if chunk.depth:
        assert prop.enumeration is not None
        listed = prop.enumeration.cases(chunk.space, chunk.depth, chunk.index)
        return list(dict.fromkeys(map(chunk.fitted, listed)))
    listed = (*prop.examples, *(prop.for_cells if chunk.per_cell else ())) if chunk.index == 0 else ()
    examples = [case for case in listed if case.world_size == chunk.world_size and case.is_within(chunk.dtypes)]
    array = covering_array_of(prop, chunk)
    rows = [row.case for row in array.rows] if array else []
    drawn = [] if array else draw_cases(prop, chunk, chunk.num_cases)
    cases = [*examples[: chunk.examples], *drawn, *(case for case in rows if case.world_size == chunk.world_size)]
    cases = [chunk.fitted(case) for case in cases]
    return list(dict.fromkeys(cases + ([] if chunk.index else _of_missing_aspects(prop, chunk, cases + rows))))


def covering_array_of(prop: Property, chunk: Chunk) -> Array | None:
    """Returns the covering array from which the chunk's cases are taken, or None if the cases are random.

    If world sizes are mixed, the array has all world sizes of the run and no others. So a run on few world sizes has
    all combinations too.
    """
    build = builder_of(prop.cases)
    if not chunk.strength or build is None:
        return None
    sizes = sorted({*prop.among(chunk.world_sizes), chunk.world_size})
    space = Space(tuple(sizes), chunk.dtypes) if chunk.mixes_worlds else chunk.space
    seed = seed_of(prop, replace(chunk, world_size=0 if chunk.mixes_worlds else chunk.world_size))
    strength = 1 if prop.refuses_only and chunk.mixes_worlds else chunk.strength
    return _covering_array(prop.cases, space, strength, seed, () if chunk.mixes_worlds else dangerous_axes(prop.cases))


@lru_cache(maxsize=64)
def _covering_array(cases: Any, space: Space, strength: int, seed: int, dangerous: tuple[str, ...]) -> Array:
    build = builder_of(cases)
    assert build is not None
    cases(space)  # raises Misuse if no case can be built, which the array would count as infeasible
    return covering_array(build, space, strength, seed, dangerous)


def replay_of(prop: Property, chunk: Chunk, case: Case) -> ExampleDatabase | None:
    """Returns a database that makes Hypothesis begin with `case`, or None if the covering array lacks the case."""
    array = covering_array_of(prop, chunk)
    rows = [row for row in array.rows if row.case == case] if array else []
    return _OneExample([index for name, index in rows[0].choices if name != "world_size"]) if rows else None


class _OneExample(ExampleDatabase):
    """A database of Hypothesis with the choices of one example.

    Source for the form of a choice: SampledFromStrategy.do_draw (one integer, none for a table of one entry) and
    hypothesis.database.choices_to_bytes, Hypothesis 6.170.  A release without that function begins at random.
    """

    def __init__(self, choices: list[int]) -> None:
        super().__init__()
        to_bytes = getattr(hypothesis.database, "choices_to_bytes", None)
        self._examples = [to_bytes(choices)] if to_bytes else []

    def fetch(self, key: bytes) -> list[bytes]:
        return self._examples

    def save(self, key: bytes, value: bytes) -> None:
        pass

    def delete(self, key: bytes, value: bytes) -> None:
        pass


def _of_missing_aspects(prop: Property, chunk: Chunk, cases: Iterable[Case]) -> list[Case]:
    seen = {aspect for case in cases for aspect in case.aspects}
    further: list[Case] = []
    for aspect in prop.aspects_of(chunk.space):
        if aspect not in seen:
            having = prop.cases(chunk.space).filter(partial(_has, aspect))
            with contextlib.suppress(Unsatisfiable):  # no case of the space has it
                drawn = _drawn(having, seed_of(prop, replace(chunk, seed=f"{chunk.seed}, {aspect}")), 1)
                further += map(chunk.fitted, drawn)
            seen.update(*(case.aspects for case in further))
    return further


def _has(aspect: str, case: Case) -> bool:
    return aspect in case.aspects


def draw_cases(prop: Property, chunk: Chunk, num_cases: int) -> list[Case]:
    return [chunk.fitted(case) for case in _drawn(prop.cases(chunk.space), seed_of(prop, chunk), num_cases)]


def _drawn(strategy: SearchStrategy[Case], seed: int, num_cases: int) -> list[Case]:
    cases = []

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=num_cases, phases=[Phase.generate], **SETTINGS)
    @hypothesis.given(strategy)
    def keep(case: Case) -> None:
        cases.append(case)

    with no_local_constants():
        keep()
    return cases
