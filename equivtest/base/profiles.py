"""Defines the profiles, which say how much a run does, and divides the cases of a property into searches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from equivtest.base import limits

SHARD_KINDS = ("even", "uneven", "empty")
ANY = "any"  # shard kind of every case of a property of refusals

PER_CELL = 5
"""Number of conclusive verdicts that a conformance run needs on each claim in each cell."""
MAX_INCONCLUSIVE = 0.05
"""Largest fraction of a cell's verdicts that may be inconclusive.  The summary counts the cells above it."""


@dataclass(frozen=True)
class Profile:
    """The number of cases that a run has for each property, and other settings of a run.

    The numbers are for a property of weight 1. A property of weight 3 has three times as many cases.

    Attributes:
        single: Number of cases on one rank. The number is small, because one rank shards nothing.
        several: Number of cases on each larger world size.
        chunk: Largest number of cases in one search. It is small enough to distribute the searches over xdist workers,
            and large enough that the time to start ranks does not matter.
        world_sizes: World sizes if --world-sizes is not given.
        repeats: True if a search repeats with fresh seeds until the time is up.
        requires_cells: True if a cell (world size, dtype, shard kind) without a conclusive verdict is a failure.
        strength: Number of axes whose combinations of values all occur in the cases. If 2, the cases have each
            combination of values of any two axes (`equivtest.search.covering`). A number above 0 needs a family that
            draws from tables. Then `single` and `several` are unused. If 0, cases are random.
        mixes_worlds: True if the world size is one of the axes that are combined. If False, the cases of each world
            size have all combinations.
        examples: Number of a property's first examples that run on each world size. If None, all examples run.
        per_cell: Number of conclusive verdicts that each claim needs in every cell. A run adds cases until then.
        audits_alone: True if a run consists of audits alone, and audits each property completely.
        is_first_look: True if the profile has so few cases that claims may hold in this profile and fail in other
            profiles. The summary then says so.
        minutes: Measured duration of all shipped properties on two cores with no other work, or 0 if unknown.
    """

    single: int
    several: int
    chunk: int = 30
    world_sizes: tuple[int, ...] = limits.WORLD_SIZES
    repeats: bool = False
    requires_cells: bool = False
    strength: int = 0
    mixes_worlds: bool = True
    examples: int | None = None
    per_cell: int = 0
    audits_alone: bool = False
    is_first_look: bool = False
    minutes: int = 0

    @property
    def draws_many(self) -> bool:
        """True if the profile has more cases than the gate, as soak and conformance have."""
        return self.repeats or self.requires_cells


AUDIT_PROFILE = "audit"
AUDIT_LABEL = "audit"
CALLS = "calls-"
"""Part of the label of a search that enumerates calls."""

PROFILES: dict[str, Profile] = {
    "smoke": Profile(single=1, several=1, strength=1, examples=1, is_first_look=True),
    "gate": Profile(single=1, several=3, strength=2, minutes=15),
    "soak": Profile(single=1, several=4, world_sizes=limits.SOAK_WORLD_SIZES, repeats=True),
    "conformance": Profile(
        single=10, several=20, strength=2, mixes_worlds=False, requires_cells=True, per_cell=PER_CELL, minutes=30
    ),
    AUDIT_PROFILE: Profile(single=0, several=0, audits_alone=True),
}

DEFAULT_PROFILE = "gate"
SOAK_S = 600.0  # if --max-time is not given


@dataclass(frozen=True)
class Part:
    """Plan of one search of a property: `num_cases` cases on `world_size` ranks.

    Attributes:
        index: Number of the search among the property's searches on that world size, from 0.
        per_cell: Number of conclusive verdicts that this search must get on each claim in every cell.
        depth: Which list of the property's `Enumeration` the search runs. It is 1 for the shorter list of a gate, 2 for
            the list of a conformance run, and 0 if the cases do not come from an `Enumeration`.
        strength, mixes_worlds, examples: Same as in `Profile`. The strength is 0 if the cases are random.
    """

    world_size: int
    index: int
    num_cases: int
    per_cell: int = 0
    strength: int = 0
    mixes_worlds: bool = True
    depth: int = 0
    examples: int | None = None

    @property
    def cost(self) -> int:
        """Approximate duration of the search, without a unit."""
        return self.num_cases * (1 + self.world_size)

    @property
    def label(self) -> str:
        """Text in brackets in the search's node id."""
        return f"w{self.world_size}-{CALLS * bool(self.depth)}{self.index}"


def plan(
    profile: Profile, world_sizes: Iterable[int], weight: int = 1, *, has_tables: bool = False
) -> tuple[Part, ...]:
    """Divides the cases of one property into searches of about equal size, fewest ranks first.

    Args:
        has_tables: True if a covering array can choose the cases. Then each world size has one search.
    """
    if profile.strength and has_tables:
        shared = {name: getattr(profile, name) for name in ("per_cell", "strength", "mixes_worlds", "examples")}
        return tuple(Part(size, 0, profile.several, **shared) for size in world_sizes)
    parts = []
    for world_size in world_sizes:
        num_cases = weight * (profile.single if world_size == 1 else profile.several)
        if not num_cases:
            continue
        num_parts = -(-num_cases // profile.chunk)
        sizes = [num_cases // num_parts + (index < num_cases % num_parts) for index in range(num_parts)]
        per_cell = -(-profile.per_cell // num_parts)
        parts += [
            Part(world_size, index, size, per_cell, examples=profile.examples) for index, size in enumerate(sizes)
        ]
    return tuple(parts)


def plan_enumeration(profile: Profile, num_parts: Mapping[int, int]) -> tuple[Part, ...]:
    """Returns the plans of the searches of a property's enumeration, or () for the profiles smoke and soak.

    Args:
        num_parts: Number of searches by world size.
    """
    depth = 0 if profile.is_first_look or not profile.strength else 1 if profile.mixes_worlds else 2
    return tuple(
        Part(size, index, CALLS_PER_PART, depth=depth)
        for size, num in num_parts.items()
        for index in range(num if depth else 0)
    )


CALLS_PER_PART = 300
"""Approximate number of cases in one search of an enumeration.  Only the search's cost depends on it."""


def wanted_kinds(
    world_size: int, *, refusals: bool, shards: bool = True, conclusive: Collection[str] = ()
) -> tuple[str, ...]:
    """Returns the shard kinds for which a conformance run must reach conclusions on `world_size` ranks.

    Args:
        refusals: True if the property is about cases outside the contract. Then the shards of the cases do not matter,
            and the result is ('any',).
        shards: False if the subject's tensors are not sharded.
        conclusive: Shard kinds in which conclusions are possible. If empty, conclusions are possible in all kinds.
    """
    if refusals:
        return (ANY,)
    kinds = SHARD_KINDS if shards and world_size > 1 else ("even",)  # one rank holds everything
    return tuple(kind for kind in kinds if kind in (conclusive or kinds))
