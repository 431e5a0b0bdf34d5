"""Defines a property: claims that must hold for one subject on all cases of one family."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    """The world sizes and dtypes from which one search draws its cases.

    Attributes:
        world_sizes: Numbers of ranks, at least one number. The first is the simplest.
        dtypes: Names of dtypes, at least one. The first is the simplest.
    """

    world_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class Enumeration:
    """Cases that the family lists from a table, without a covering array or random draws.

    Attributes:
        cases: Function (space with one world size, depth, number of the search) -> the search's cases. The depth is 1
            for a gate, 2 for a conformance run.
        parts: Number of searches into which the cases of a world size are divided, by world size.
    """

    cases: Callable[[Space, int, int], Sequence[Case]]
    parts: Mapping[int, int] = field(hash=False)  # a property has a hash, a dict has none


@dataclass(frozen=True)
class Property:
    """A statement about a subject, with the cases on which it is tested and the claims that are judged.

    Attributes:
        subject: The subject's registered name, or 'package.module:function'.
        statement: What the property claims, in one sentence.
        source: The documentation of the contract, with the release whose documentation was read.
        cases: Function of a `Space` that returns the Hypothesis strategy of the cases in it.
        claims: The claims. All claims are judged from the same run of a case.
        examples: Cases that always run, before all others, such as cases that once failed.
        for_cells: Cases for cells that drawn cases seldom reach. Only a run that requires all cells has these cases.
        weight: Share of the cases of a run, relative to the other properties.
        conclusive_dtypes: Dtypes in which a conformance run must reach conclusions. If empty, these are all dtypes of
            the run.
        conclusive_shards: Shard kinds for which a conformance run must reach conclusions. If empty, these are all
            kinds. Leave a kind out if all its cases are known failures, because then no conclusion is possible.
        shards: True if the subject's tensors are sharded. If False, every case counts as even.
        without_collectives: Reason why the subject correctly calls no collective on several ranks. If the subject calls
            none and this is empty, the run shows nothing and ends with an error: see `equivtest.search.audit`.
        incomplete: Reason why a soak leaves the property out, and why a conformance run has only the gate's cases of
            it, unless --subjects names it. Further cases find failures that no list of known failures has yet. No cell
            of the property needs a conclusion.
        requires: Package that the subject imports and equivtest does not import. If the package is missing, the
            property does not run.
        leaves_out: Function of a `Space` that returns each of its dtypes in which no case can be judged -> the reason,
            or ''. If None, every dtype has cases.
        aspects: Function of a `Space` that returns all words, such as 'uneven', that `Case.aspects` has for its cases.
            Some case must run for each word. If None, the words are 'even' and 'uneven'.
        world_sizes: Numbers of ranks on which the subject runs. If empty, it runs on any number.
        resolve: Function (property, pool, space) -> the property to judge, for a property that depends on facts that
            only a run on ranks shows: see `resolved`. If None, the property itself is judged.
        enumeration: Additional cases for a gate and for a conformance run.
        limit_s: Seconds that one visit of one case may take on all ranks. A longer visit has timed out. On the CPU the
            limit grows in proportion to the ranks beyond 8.

    Raises:
        Misuse: limit_s is no number above 0, or more than half of the backend's time-out.
    """

    subject: str
    statement: str
    source: str
    cases: Callable[[Space], SearchStrategy[Case]]
    claims: tuple[Claim, ...]
    examples: tuple[Case, ...] = ()
    for_cells: tuple[Case, ...] = ()
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
        return [claim.name for claim in self.claims] == ["refuses"]

    def among(self, world_sizes: Iterable[int]) -> tuple[int, ...]:
        return tuple(size for size in world_sizes if not self.world_sizes or size in self.world_sizes)

    def left_out(self, space: Space) -> Mapping[str, str]:
        """Returns dtype -> reason, or '', for each dtype of the space in which no case can be judged."""
        return {} if self.leaves_out is None else self.leaves_out(space)

    def aspects_of(self, space: Space) -> Collection[str]:
        """Returns the words, such as 'uneven', for which the first search must have a case: see `Case.aspects`."""
        if self.aspects is not None:
            return self.aspects(space)
        if space.world_sizes == (1,) or not self.shards or self.refuses_only:
            return ()
        kinds = self.conclusive_shards
        return [kind for kind in ("even", "uneven") if not kinds or kind in kinds]

    def is_empty(self, space: Space) -> bool:
        return len(self.left_out(space)) == len(space.dtypes)

    @property
    def absent(self) -> str:
        """The reason why the subject cannot run here, with a remedy, or ''."""
        if not self.requires or importlib.util.find_spec(self.requires):
            return ""
        return f"{self.requires} is not installed: pip install {self.requires}"


def require_limit(limit_s: object, name: str = "limit_s") -> None:
    """Raises Misuse unless `limit_s` is a valid time limit for one run of a case, in seconds."""
    is_number = isinstance(limit_s, int | float) and not isinstance(limit_s, bool)
    if not is_number or not 0 < limit_s <= limits.COLLECTIVE_S / 2:  # type: ignore[operator]
        raise Misuse(
            f"{name} must be seconds, above 0 and at most {limits.COLLECTIVE_S / 2:g}, got {limit_s!r}: the backend's "
            f"own time-out of {limits.COLLECTIVE_S:g} s has to be longer, so that the rank that is the cause is named; "
            "take smaller shapes, fewer steps or a smaller module"
        )


ON_TWO_RANKS = Space((2,), limits.DTYPES)


def resolved(prop: Property, pool: Pool, space: Space = ON_TWO_RANKS) -> Property:
    """Returns the property to judge, after a run on ranks of `space` if the property depends on one.

    Raises:
        Misuse: the ranks do not agree, or cannot answer.
    """
    return prop if prop.resolve is None else prop.resolve(prop, pool, space)
