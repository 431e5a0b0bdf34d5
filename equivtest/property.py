"""A property: claims that hold of one subject over all cases of one family."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from equivtest.base import limits
from equivtest.errors import Misuse

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from equivtest.cases.case import Case
    from equivtest.ranks.pool import Pool
    from equivtest.verdicts.claims import Claim


@dataclass(frozen=True)
class Space:
    """The part of the case space that one search draws from.

    Attributes:
        world_sizes: At least one; the first is the simplest.
        dtypes: At least one; the first is the simplest.
    """

    world_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class Enumeration:
    """Cases from a table of the family, in place of random ones or a covering array.

    Attributes:
        cases: Gives the cases of one of the parts, of a space of one world size.  A depth of 1 is what a gate runs, 2
            what a conformance run has.
        parts: How many searches share them.
        world_sizes: On which there are any.
    """

    cases: Callable[[Space, int, int], Sequence[Case]]
    parts: int
    world_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Property:
    """What is claimed of a subject.

    Attributes:
        subject: Registered name, or 'package.module:function'.
        statement: The claim in one sentence.
        source: Where the contract stands, with the release it was read in.
        cases: Makes the strategy for one part of the case space.
        claims: Judged together from one run of each case.
        examples: Cases that are always run, first: bugs somebody once had.
        weight: Share of the cases of a run, relative to the other properties.
        conclusive_dtypes: In which a conformance run has to reach conclusions, where not in all.
        conclusive_shards: Kinds of shards of which it has to, where not of all: none are to be had
            where every case of a kind is a known failure.
        shards: Whether its tensors are sharded at all; if not, every case counts as even.
        without_collectives: Why its subject calls no collective on several ranks, where that is right: without such a
            reason a run in which none is called shows nothing (`equivtest.search.audit`).
        incomplete: Why a run of many cases leaves it out unless --subjects names it: such cases find failures that the
            known ones do not cover yet.
        requires: Package that the subject imports and equivtest does not; without it nothing is run.
        leaves_out: Names the dtypes of a space in which none of its cases can be judged, each with the reason or '';
            None: each has some that can.
        aspects: Names each of `Case.aspects` that some case of a space has; None: even and uneven shards.
        world_sizes: Numbers of ranks that its subject runs on; empty: any.
        resolve: Makes the property that is meant, where the ranks must be asked for it: see `resolved`.
        enumeration: Cases that a gate and a conformance run have besides.
        limit_s: Seconds that one visit of one case may take on all ranks, before it has timed out.

    Raises:
        Misuse: limit_s is no number above 0, or more than half of the backend's own time-out.
    """

    subject: str
    statement: str
    source: str
    cases: Callable[[Space], SearchStrategy[Case]]
    claims: tuple[Claim, ...]
    examples: tuple[Case, ...] = ()
    weight: int = 1
    conclusive_dtypes: tuple[str, ...] = ()
    conclusive_shards: tuple[str, ...] = ()
    shards: bool = True
    without_collectives: str = ""
    incomplete: str = ""
    requires: str = ""
    leaves_out: Callable[[Space], Mapping[str, str]] | None = None
    aspects: Callable[[Space], Collection[str]] | None = None
    world_sizes: tuple[int, ...] = ()
    resolve: Callable[[Property, Pool, Space], Property] | None = None
    enumeration: Enumeration | None = None
    limit_s: float = limits.CASE_S

    def __post_init__(self) -> None:
        require_limit(self.limit_s)

    @property
    def refuses_only(self) -> bool:
        """Whether it is about cases outside the contract."""
        return [claim.name for claim in self.claims] == ["refuses"]

    def among(self, world_sizes: Iterable[int]) -> tuple[int, ...]:
        """Those of them that its subject runs on."""
        return tuple(size for size in world_sizes if not self.world_sizes or size in self.world_sizes)

    def left_out(self, space: Space) -> Mapping[str, str]:
        """The dtypes of the space in which none of its cases can be judged, each with the reason or ''."""
        return {} if self.leaves_out is None else self.leaves_out(space)

    def aspects_of(self, space: Space) -> Collection[str]:
        """Names the aspects that the first search of the space must have."""
        if self.aspects is not None:
            return self.aspects(space)
        if space.world_sizes == (1,) or not self.shards or self.refuses_only:
            return ()
        kinds = self.conclusive_shards
        return [kind for kind in ("even", "uneven") if not kinds or kind in kinds]

    def is_empty(self, space: Space) -> bool:
        """Whether none of its cases can be judged in any dtype of the space."""
        return len(self.left_out(space)) == len(space.dtypes)

    @property
    def absent(self) -> str:
        """Why the subject cannot run here, and the way out; '' where it can."""
        if not self.requires or importlib.util.find_spec(self.requires):
            return ""
        return f"{self.requires} is not installed: pip install {self.requires}"


def require_limit(limit_s: object, name: str = "limit_s") -> None:
    """Raises Misuse unless `limit_s`, which the caller knows by `name`, is seconds that one visit may take."""
    is_number = isinstance(limit_s, int | float) and not isinstance(limit_s, bool)
    if not is_number or not 0 < limit_s <= limits.COLLECTIVE_S / 2:  # type: ignore[operator]
        raise Misuse(
            f"{name} must be seconds, above 0 and at most {limits.COLLECTIVE_S / 2:g}, got {limit_s!r}: the backend's "
            f"own time-out of {limits.COLLECTIVE_S:g} s has to be longer, so that the rank that is the cause is named; "
            "take smaller shapes, fewer steps or a smaller module"
        )


ON_TWO_RANKS = Space((2,), limits.DTYPES)


def resolved(prop: Property, pool: Pool, space: Space = ON_TWO_RANKS) -> Property:
    """The property that is meant; for most the property itself, of others the ranks of a world of `space` are asked.

    Raises:
        Misuse: they do not agree, or cannot be asked.
    """
    return prop if prop.resolve is None else prop.resolve(prop, pool, space)
